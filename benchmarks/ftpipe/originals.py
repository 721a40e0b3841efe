"""The commands of FTPipe's published partition reports, and the figures that it printed for them.

Eliad et al., USENIX ATC 2021, and its repository. Imbalances and latencies follow from the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipetransformer.graphs.analysis.ftpipe import PartTimes

__all__ = ["COMMANDS", "ORIGINALS", "Original"]


@dataclass(frozen=True, slots=True)
class Original:
    """One printout: milliseconds by part, as in ``PartitionReport``.

    Attributes:
        device: as the original names it; AmoebaNet's is not named.
        volumes: MB that each part is given and their milliseconds, MB that it gives and their milliseconds. A time is
            that of the largest tensor at 12 GB/s.
        parallel, variance, deviation: None where its script printed none.
    """

    device: str
    num_edges: int
    sequential: PartTimes
    real: PartTimes
    volumes: tuple[tuple[float, float, float, float], ...]
    parallel: PartTimes | None = None
    variance: PartTimes | None = None
    deviation: PartTimes | None = None


_AMOEBANET = "--model=amoebanet_4x512_c10 --batch_size=4 --dataset=imagenet --n_iter=50"
_GPT2 = "--train_data_file=README.md --n_iter=100 --analysis_batch_size=1 --depth=3"
COMMANDS: Mapping[str, str] = {
    "amoebanet-4p": _AMOEBANET,
    "amoebanet-4p-no-recomputation": f"{_AMOEBANET} --no_recomputation",
    "gpt2-4p": _GPT2,
    "gpt2-2p": f"{_GPT2} --n_partitions=2",
}
"""Of ``pipetransformer partition``, by report; its ``--auto_file_name`` is left out, and its text is our README."""

ORIGINALS: Mapping[str, tuple[Original, ...]] = {
    "amoebanet-4p": (
        Original(
            device="a GPU",
            num_edges=10,
            sequential=PartTimes(
                (36.56251330457627, 43.02799873426554, 46.72389183737339, 44.827516707852475),
                (171.36305918715914, 178.61170556083317, 166.52261956013749, 223.43983604289588),
            ),
            real=PartTimes(
                (17.974924278259277, 22.232363510131837, 26.400901756286622, 18.965998039245605),
                (71.50876235961914, 67.00939208984374, 66.21449188232423, 93.31653274536133),
            ),
            volumes=(
                (2.408448, 0.200704, 57.802752, 1.605632),
                (57.802752, 1.605632, 12.845056, 0.802816),
                (12.845056, 0.802816, 16.05632, 0.535210666666667),
                (16.05632, 0.535210666666667, 0.00016, 1.3333333333e-05),
            ),
        ),
    ),
    "amoebanet-4p-no-recomputation": (
        Original(
            device="a GPU",
            num_edges=10,
            sequential=PartTimes(
                (37.34155520811677, 42.5077638154477, 46.80358269296588, 45.04414840660991),
                (138.5753146025539, 136.77676357328895, 121.96041022807358, 180.56821946501742),
            ),
            real=PartTimes(
                (18.25617607116699, 22.505909080505372, 26.244375038146973, 19.247387466430663),
                (54.97085975646973, 44.10177391052246, 41.42689224243164, 74.43851486206054),
            ),
            volumes=(
                (2.408448, 0.200704, 44.957696, 1.605632),
                (44.957696, 1.605632, 12.845056, 0.802816),
                (12.845056, 0.802816, 16.05632, 0.535210666666667),
                (16.05632, 0.535210666666667, 0.00016, 1.3333333333e-05),
            ),
        ),
    ),
    "gpt2-4p": (
        Original(
            device="GTX 1070",
            num_edges=6,
            sequential=PartTimes(
                (15.257272641509772, 18.691171215325596, 18.559264333397145, 22.04674082353711),
                (44.93089503392578, 48.93922274261713, 48.409781450927255, 54.062987170219415),
            ),
            parallel=PartTimes(
                (15.134735041409732, 18.691171215325596, 18.559264333397145, 22.04674082353711),
                (43.617220152169466, 48.93922274261713, 48.409781450927255, 54.062987170219415),
            ),
            real=PartTimes(
                (29.06242519378662, 37.26200588226318, 35.9077853012085, 45.47105686187744),
                (80.45442192077637, 97.3022738647461, 92.46670097351074, 162.57930572509767),
            ),
            variance=PartTimes(
                (0.13881304385381554, 0.15031249676076186, 0.13087562668783903, 0.07331513883627849),
                (0.5680862995495772, 0.5039042185289873, 0.5032058937613328, 0.4535194009367842),
            ),
            volumes=(
                (0.008192, 0.000682666666667, 22.020096, 0.524288),
                (3.145728, 0.262144, 40.894464, 1.048576),
                (15.72864, 1.048576, 28.311552, 0.524288),
                (3.15392, 0.262144, 212.144132, 17.154389333333334),
            ),
        ),
        Original(
            device="GTX 1080 Ti",
            num_edges=6,
            sequential=PartTimes(
                (7.946790392026305, 8.952704619914293, 8.291612477153539, 13.273960301578045),
                (30.137932797148828, 30.53103773236276, 28.40093950986862, 36.53461210787297),
            ),
            parallel=PartTimes(
                (7.862618553191424, 8.952704619914293, 8.291612477153539, 13.273960301578045),
                (29.0828777641058, 30.53103773236276, 28.40093950986862, 36.53461210787297),
            ),
            real=PartTimes(
                (15.674007682800292, 18.47265464782715, 16.321795539855955, 29.55298496246338),
                (43.18593852996826, 48.11459651947021, 43.744543800354, 91.07087516784668),
            ),
            variance=PartTimes(
                (0.03708443954104723, 0.029927599875975375, 0.015442574127860098, 0.08610070922020441),
                (0.29592279116150166, 0.21635607180041916, 0.1552280260277712, 0.3711267797407345),
            ),
            volumes=(
                (0.008192, 0.000682666666667, 22.020096, 0.524288),
                (3.145728, 0.262144, 28.311552, 0.524288),
                (3.145728, 0.262144, 34.603008, 1.048576),
                (15.736832, 1.048576, 218.435588, 17.154389333333334),
            ),
        ),
    ),
    "gpt2-2p": (
        Original(
            device="GTX 1070",
            num_edges=2,
            sequential=PartTimes((37.0056524760276, 41.31054489523172), (100.22950369648636, 103.3464676517248)),
            parallel=PartTimes((36.88228383630513, 41.31054489523172), (98.90303297832608, 103.3464676517248)),
            real=PartTimes((68.17288322448731, 81.0383750152588), (182.0754313659668, 255.22701614379883)),
            variance=PartTimes((5.630224710964103, 5.866949295208201), (21.168108311935583, 47.01719401496394)),
            deviation=PartTimes((1.4194109344482428, 1.759861090087893), (3.149541864013676, 5.003213647460941)),
            volumes=(
                (0.008192, 0.000682666666667, 50.331648, 0.524288),
                (6.299648, 0.262144, 237.309956, 17.154389333333334),
            ),
        ),
    ),
}
