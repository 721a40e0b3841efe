"""The report hears every event that a run can tell."""

from __future__ import annotations

import inspect

from pipetransformer.run import events, report


def test_the_report_hears_every_event() -> None:
    kinds = {kind for _, kind in inspect.getmembers(events, inspect.isclass) if issubclass(kind, events.Event)}
    heard = vars(report.Report)["hear"].dispatcher.registry
    assert heard.keys() - {object} == kinds - {events.Event}
    assert len(set(heard.values())) == len(heard), "two events share a note"
