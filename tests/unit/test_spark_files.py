"""Spark's checkpoint in an object store: what a commit names of it, and what a run gets back."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import Damaged, InvalidPipeline
from holdfast.runtime.spark_files import SparkFiles
from holdfast.testing.memory import MemoryStorage


def written(directory: Path, batch: int) -> Path:
    """A checkpoint as Spark leaves it when it begins `batch`; its log of files is compacted at every third entry."""
    names = ["metadata", ".metadata.crc", "sources/1/0"]
    for number in range(batch + 1):
        names += [f"offsets/{number}", f"offsets/.{number}.crc"]
        names += [f"commits/{number}"] if number < batch else []
        names += [f"sources/0/{number}.compact" if number % 3 == 2 else f"sources/0/{number}"]
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"content of {name}")
    return directory


def files_below(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_what_a_batch_needs_to_begin_again_is_kept_and_comes_back(tmp_path: Path) -> None:
    files = SparkFiles(MemoryStorage())
    kept = files.keep(written(tmp_path / "spark", 9), 9, 10, {})
    files.bring(kept, tmp_path / "elsewhere")
    wanted = (
        "metadata", "offsets/8", "offsets/9", "commits/8", "sources/0/8.compact", "sources/0/9", "sources/1/0",
    )  # fmt: skip
    assert files_below(tmp_path / "elsewhere") == {name: f"content of {name}" for name in wanted}


def test_the_first_batch_has_nothing_before_it(tmp_path: Path) -> None:
    kept = SparkFiles(MemoryStorage()).keep(written(tmp_path, 0), 0, 1, {})
    assert set(kept) == {"metadata", "offsets/0", "sources/0/0", "sources/1/0"}


def test_a_file_is_sent_once(tmp_path: Path) -> None:
    storage = MemoryStorage()
    files = SparkFiles(storage)
    first = files.keep(written(tmp_path, 3), 3, 4, {})
    before = set(storage.objects)
    second = files.keep(written(tmp_path, 4), 4, 5, first)
    sent = set(storage.objects) - before
    assert {name for name, ref in second.items() if ref.name in sent} == {"offsets/4", "commits/3", "sources/0/4"}
    assert all(name.startswith("spark/00000000000000000005-") for name in sent)


def test_two_runs_that_plan_one_batch_do_not_meet(tmp_path: Path) -> None:
    files = SparkFiles(MemoryStorage())
    one, other = written(tmp_path / "one", 1), written(tmp_path / "other", 1)
    (other / "offsets/1").write_text("another plan")
    kept = [files.keep(directory, 1, 2, {}) for directory in (one, other)]
    for number, (directory, refs) in enumerate(zip((one, other), kept, strict=True)):
        files.bring(refs, tmp_path / str(number))
        assert (tmp_path / str(number) / "offsets/1").read_text() == (directory / "offsets/1").read_text()


def test_a_file_that_an_earlier_run_planned_otherwise_is_sent_again(tmp_path: Path) -> None:
    files = SparkFiles(MemoryStorage())
    first = files.keep(written(tmp_path, 1), 1, 2, {})
    (tmp_path / "offsets/1").write_text("another plan")
    assert files.keep(tmp_path, 1, 2, first)["offsets/1"] != first["offsets/1"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    storage = MemoryStorage()
    files = SparkFiles(storage)
    kept = files.keep(written(tmp_path / "spark", 1), 1, 2, {})
    storage.objects[kept["offsets/1"].name] = b"x"
    with pytest.raises(Damaged, match=kept["offsets/1"].name):
        files.bring(kept, tmp_path / "elsewhere")


def test_state_of_spark_s_own_is_refused(tmp_path: Path) -> None:
    (written(tmp_path, 0) / "state" / "0").mkdir(parents=True)
    with pytest.raises(InvalidPipeline, match="cannot be in an object store"):
        SparkFiles(MemoryStorage()).keep(tmp_path, 0, 1, {})
