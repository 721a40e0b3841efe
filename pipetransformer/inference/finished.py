"""A run that has ended, as Python sees it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetransformer.errors import UserError
from pipetransformer.run.page import History, read_history, write_report

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from pipetransformer.inference.predictor import Prediction
    from pipetransformer.inference.saved import Which


class Run:
    """A run, by its folder.

        run = pipetransformer.Run("runs/1000")
        run.metrics["accuracy"], run.freezes, run.predict(["a fine film"])

    Attributes:
        folder: its folder.
        history: everything that its files tell.

    Raises:
        UserError: there is no run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.history: History = read_history(self.folder)

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {value:.4f}" for name, value in self.best_metrics.items())
        return f"Run({str(self.folder)!r}: {told or 'not ended'})"

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty where it has not ended."""
        return self.history.summary

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the last evaluation."""
        return dict(self.summary.get("metrics", {}))

    @property
    def best_metrics(self) -> dict[str, float]:
        """Those of the best evaluation."""
        return dict(self.summary.get("best_metrics", {}))

    @property
    def evaluations(self) -> pd.DataFrame:
        """A row for each evaluation: step, train_s, and the metrics."""
        import pandas as pd

        return pd.DataFrame([{"step": p.step, "train_s": p.train_s, **p.figures} for p in self.history.evaluations])

    @property
    def freezes(self) -> pd.DataFrame:
        """A row for each plan: step, train_s, frozen, pp, dp, microbatches, reason."""
        import pandas as pd

        rows = []
        for change in self.history.plans:
            plan = change.plan
            pp, dp, microbatches = plan["pp"], plan["dp"], plan["num_microbatches"]
            row = {"step": change.step, "train_s": change.train_s, "frozen": plan["frozen"], "pp": pp, "dp": dp}
            rows.append({**row, "microbatches": microbatches, "reason": change.reason})
        return pd.DataFrame(rows)

    def model(self, module: nn.Module | None = None, *, which: Which = "best") -> Any:
        """The trained model, in evaluation: of timm or transformers; or ``module``, with the run's weights.

        Args:
            module: of a run of a module of your own: one of the same class.
            which: ``best`` or ``final``.

        Raises:
            UserError: it is not there, or of another class.
        """
        if module is not None:
            from safetensors.torch import load_file

            path = self.folder / "model" / which / "model.safetensors"
            if not path.is_file():
                raise UserError(f"{path}: is not there; give which='final', or let the run end")
            try:
                module.load_state_dict(load_file(path))
            except RuntimeError as error:  # of many lines, a name in each
                said = " ".join(str(error).split())[:200]
                raise UserError(f"{path}: is of another module than {type(module).__name__} ({said})") from error
            return module.eval()
        return self._predictor(which).model

    def predict(self, samples: Iterable[Any], *, which: Which = "best", batch_size: int = 32) -> list[Prediction]:
        """What the model says of texts, pairs of texts, (question, context) pairs, or paths of pictures."""
        given = [(sample,) if isinstance(sample, str) else sample for sample in samples]
        predictor = self._predictor(which)
        if predictor.takes_paths:
            given = [Path(sample[0]) if isinstance(sample, tuple) else Path(sample) for sample in given]
        return list(predictor.predict(given, batch_size=batch_size))

    def report(self) -> Path:
        """Writes ``report.html``, and gives its path."""
        path = self.folder / "report.html"
        write_report([self.history], path)
        return path

    def _predictor(self, which: Which) -> Any:
        from pipetransformer.inference.predictor import open_predictor
        from pipetransformer.inference.saved import find_saved

        return open_predictor(find_saved(self.folder, which=which))
