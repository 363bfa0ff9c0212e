"""What Holdfast shows to the world: these names, documented, typed, and quick to import."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import holdfast
import holdfast.errors
import holdfast.testing

ROOT = Path(__file__).parents[2]


def test_the_public_names_are_these() -> None:
    assert holdfast.__all__ == [
        "Application",
        "ConnectionConfig",
        "KafkaMessage",
        "Persistence",
        "Place",
        "Record",
        "RocksDBOptions",
        "State",
        "StateView",
        "StreamingDataFrame",
        "Topic",
        "TopicConfig",
    ]


@pytest.mark.parametrize("name", holdfast.__all__)
def test_a_public_name_is_there_when_it_is_asked_for(name: str) -> None:
    assert getattr(holdfast, name).__name__ == name
    assert name in dir(holdfast)


def test_a_name_that_does_not_exist_is_not_there() -> None:
    assert not hasattr(holdfast, "Applikation")
    with pytest.raises(ImportError):
        from holdfast import Applikation  # noqa: F401


def test_the_package_alone_loads_little() -> None:
    done = run_python(
        "-c", "import sys, holdfast; holdfast.errors; print('pyspark' in sys.modules, 'pyarrow' in sys.modules)"
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_the_public_names_for_tests_are_these() -> None:
    assert holdfast.testing.__all__ == [
        "DRIVER_POINTS",
        "TASK_POINTS",
        "Crash",
        "Harness",
        "LocalRunner",
        "MemoryStorage",
        "MemoryStores",
        "run",
    ]


def public_things() -> dict[str, Any]:
    """By name: every public class and function, and the public methods and properties of the classes."""
    things: dict[str, Any] = {}
    modules: list[ModuleType] = [holdfast, holdfast.testing]
    for module in modules:
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing):
                things[f"{module.__name__}.{name}"] = thing
    for name, kind in inspect.getmembers(holdfast.errors, inspect.isclass):
        things[f"holdfast.errors.{name}"] = kind
    ports = ("LocalRunner", "MemoryStorage", "MemoryStores")  # their methods are those of documented protocols
    for name, thing in list(things.items()):
        if inspect.isclass(thing) and not name.endswith(ports):
            for member, function in vars(thing).items():
                if not member.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                    things[f"{name}.{member}"] = function
    return things


@pytest.mark.parametrize("name", public_things())
def test_every_public_name_is_documented(name: str) -> None:
    thing = public_things()[name]
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert text and text.strip()[0].isupper() | text.strip().startswith("`")


@pytest.mark.parametrize("verb", ["apply", "inspect", "foreach_batch", "to_table"])
def test_the_verbs_say_what_they_guarantee(verb: str) -> None:
    assert "Guaranteed:" in getattr(holdfast.StreamingDataFrame, verb).__doc__


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_an_import_starts_no_jvm_and_needs_no_pandas() -> None:
    done = run_python(
        "-c",
        "import sys, os, subprocess\n"
        "def refuse(*_, **__): raise SystemExit('a process was started')\n"
        "subprocess.Popen.__init__ = refuse\n"
        "import holdfast, holdfast.testing\n"
        "import tempfile\n"
        "app = holdfast.Application('a', state_dir=tempfile.mkdtemp())\n"
        "app.dataframe(app.from_iterable([1])).to_table('t').print()\n"
        "import pyspark\n"
        "assert pyspark.SparkContext._gateway is None, 'a gateway was made'\n"
        "print('pandas' in sys.modules)\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_typed_program_passes_strict_type_checks() -> None:
    done = run_python("-m", "mypy", "--strict", "tests/unit/typed_sample.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(holdfast.__file__).parent / "py.typed").exists()
