"""Keys as they are configured: stripped, printable ASCII, and never in a message."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from headrace.data.errors import InvalidInput
from headrace.data.keys import UnusableKey, configured_key, usable_key
from headrace.files import Key, checked

FIRST, SECOND = "HEADRACE_TEST_FIRST_KEY", "HEADRACE_TEST_SECOND_KEY"


class Client(BaseModel):
    key: Key = None


@pytest.mark.parametrize(
    ("given", "held"),
    [("secret", "secret"), ("secret\n", "secret"), ("\t se cret\r\n", "se cret"), ("", ""), (None, None)],
)
def test_whitespace_around_a_key_is_not_of_it(given: str | None, held: str | None) -> None:
    assert usable_key(given) == held
    assert Client(key=given).key == held


@pytest.mark.parametrize("given", ["сек-рет", "sec\nret", "sec\0ret", "sec\udcffret", " \n"])
def test_a_key_that_nothing_can_carry_is_refused_by_name_and_never_shown(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnusableKey, match=r"^file: ") as refused:
        usable_key(given, name="file")
    with pytest.raises(InvalidInput, match=r"^trainer\.yaml: key: ") as unfit:
        checked(Client, {"key": given}, "trainer.yaml")
    if "\0" not in given:  # no variable can hold that
        monkeypatch.setenv(FIRST, given)
        with pytest.raises(UnusableKey, match=f"^{FIRST}: "):
            configured_key(None, FIRST)
    for said in (str(refused.value), str(unfit.value)):
        assert "ret" not in said
        assert "рет" not in said


def test_what_was_given_goes_before_the_variables_and_an_empty_one_holds_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FIRST, "")
    monkeypatch.delenv(SECOND, raising=False)
    assert configured_key(None, FIRST, SECOND) is None
    monkeypatch.setenv(SECOND, "second\n")
    assert configured_key("", FIRST, SECOND) == "second"
    assert configured_key("given\n", FIRST, SECOND) == "given"
