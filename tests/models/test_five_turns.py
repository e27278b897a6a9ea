"""Every family: five turns with a system message, unicode, one call and several, results and reasoning."""

from __future__ import annotations

from tests.models import corpus, page

from headrace.checkup.model import BRIDGED, NONE, READ, REFUSED, ModelReport


def test_every_turn_is_continued_and_everything_is_read(report: ModelReport, name: str) -> None:
    assert report.trouble == []
    assert report.turns == 5
    assert set(report.bridged.values()) <= {BRIDGED, REFUSED}


def test_what_a_family_has_is_found(report: ModelReport, name: str) -> None:
    family = corpus.FAMILIES[name]
    assert (report.tools["one"], report.tools["streamed"]) == ((READ, READ) if family.tools else (NONE, NONE))
    assert report.reasoning == READ or not family.reasoning


def test_the_page_of_models_says_so(report: ModelReport, name: str) -> None:
    assert page.row(name, report) in page.PAGE.read_text().splitlines()
