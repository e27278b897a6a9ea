"""What was logged is read back in the order in which it happened, over kills and restarts of those who log."""

from __future__ import annotations

from pathlib import Path

from headrace.storm.log import EventLog, read_log, read_logs


def test_logs_of_several_processes_are_put_in_order(tmp_path: Path) -> None:
    one, other = EventLog(tmp_path, "one"), EventLog(tmp_path, "other")
    for number in range(6):
        (one, other)[number % 2].write("counted", number=number, durable=number == 3)
    found = read_logs(tmp_path)
    assert [event["number"] for event in found] == list(range(6))
    assert [event["who"] for event in found] == ["one", "other"] * 3


def test_a_line_that_a_kill_cut_off_is_left_out_and_what_follows_is_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "one")
    log.write("whole", number=1)
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"t": 5, "e": "ha')
    log = EventLog(tmp_path, "one")
    log.write("whole", number=2)
    assert [event["number"] for event in read_log(log.path)] == [1, 2]
