"""Configuration files: read as one mapping, no key twice, wrong names answered with the nearest."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from headrace.data.errors import InvalidInput
from headrace.files import checked, expanded, read


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "x: 1\ny: {z: [2]}\n"), ("a.json", '{"x": 1, "y": {"z": [2]}}'), ("a.toml", "x = 1\ny.z = [2]\n")],
)
def test_a_file_is_yaml_json_or_toml(tmp_path: Path, name: str, text: str) -> None:
    assert read(written(tmp_path, name, text)) == {"x": 1, "y": {"z": [2]}}


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.yaml", "# later\n")) == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "x: {n: 1, m: 2, n: 3}\n"), ("a.yaml", "n: 1\n'n': 2\n"), ("a.json", '{"x": {"n": 1, "n": 1}}')],
)
def test_a_key_that_stands_twice_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=rf"{name} cannot be read.*'n' stands twice"):
        read(written(tmp_path, name, text))


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    text = "base: &base {n: 1, m: 2}\nmine:\n  <<: *base\n  n: 3\n"
    assert read(written(tmp_path, "a.yaml", text))["mine"] == {"n": 3, "m": 2}


@pytest.mark.parametrize("text", ["- 1\n", "just words\n", "x: [\n", "x: !!python/object:os.system {}\n"])
def test_what_is_not_a_mapping_of_plain_values_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=r"a\.yaml"):
        read(written(tmp_path, "a.yaml", text))


def test_a_folder_is_refused_with_a_file_that_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"{tmp_path} is a folder; name a file$"):
        read(tmp_path)
    written(tmp_path, "run.yaml", "x: 1\n")
    with pytest.raises(InvalidInput, match=f"{tmp_path} is a folder; name the file, such as {tmp_path / 'run.yaml'}$"):
        read(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"x: \xff\n")
    with pytest.raises(InvalidInput, match=r"a\.yaml cannot be read"):
        read(tmp_path / "a.yaml")


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    group_size: int = 4


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    env: Inner = Inner()
    servers: list[Inner] | None = None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"env": {"grup_size": 1}}, r"env\.grup_size is not known; did you mean group_size\?"),
        ({"servers": [{"groupsize": 1}]}, r"servers\.0\.groupsize is not known; did you mean group_size\?"),
        ({"env": {"zzz": 1}}, r"env\.zzz is not known$"),
        ({"env": {"group_size": "many"}}, r"env\.group_size: .*integer.*, not 'many'"),
    ],
)
def test_what_a_model_does_not_take_is_said_by_its_name(values: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        checked(Outer, values, "a.yaml")


def test_a_home_folder_that_is_not_known_is_said() -> None:
    assert expanded("~/m") == Path.home() / "m"
    with pytest.raises(InvalidInput, match=r"'~nouser/m' names a home folder that is not known here"):
        expanded("~nouser/m")
