"""Metrics as Prometheus reads them, of one process and of several."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.net.exposition import exposition, family, histogram, joined_by_worker


def samples(text: bytes) -> dict[tuple[str, str, tuple[tuple[str, str], ...]], float]:
    """By kind, name and labels, what a Prometheus server reads."""
    return {
        (found.type, sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for found in text_string_to_metric_families(text.decode())
        for sample in found.samples
    }


def scraped(groups: int) -> bytes:
    """A counter and a gauge whose names differ by `_total` alone."""
    return exposition(
        [
            family("groups", "counter", "groups served", [({"end": 'with "quotes"'}, groups)]),
            family("groups", "gauge", "groups that are here", [({}, 2)]),
        ]
    )


def test_a_scrape_has_the_kinds_names_and_labels_that_were_given() -> None:
    assert samples(scraped(3)) == {
        ("counter", "groups_total", (("end", 'with "quotes"'),)): 3,
        ("gauge", "groups", ()): 2,
    }


def test_a_histogram_counts_what_lies_under_each_bound() -> None:
    found = samples(exposition([histogram("seconds", "how long", [0.1, 1], [1, 2, 4], 9.5)]))
    assert {key[1:]: value for key, value in found.items()} == {
        ("seconds_bucket", (("le", "0.1"),)): 1,
        ("seconds_bucket", (("le", "1"),)): 3,
        ("seconds_bucket", (("le", "+Inf"),)): 7,
        ("seconds_count", ()): 7,
        ("seconds_sum", ()): 9.5,
    }


def test_samples_of_several_workers_are_told_apart_and_none_is_lost() -> None:
    joined = joined_by_worker([scraped(3).decode(), scraped(5).decode()])
    assert samples(joined) == {
        ("counter", "groups_total", (("end", 'with "quotes"'), ("worker", "0"))): 3,
        ("counter", "groups_total", (("end", 'with "quotes"'), ("worker", "1"))): 5,
        ("gauge", "groups", (("worker", "0"),)): 2,
        ("gauge", "groups", (("worker", "1"),)): 2,
    }
