"""The command line: look at the state and the checkpoint of an application, also of one that runs.

    holdfast state ls | get | items | export        what is in it
    holdfast checkpoint describe | verify           what it is, and whether it is whole

It reads the checkpoint and nothing else: no Spark, no Kafka, no lock. Nothing is written but a pin, for a while, if what a
command reads is removed under its hands; where it may not write, it does without. Each call sees one committed version. Exit
codes: 0 ok; 1 the checkpoint is damaged, or lacks what was asked for; 2 the call is wrong.

State is shown because somebody asked for it; an error never shows any.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain as chained
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import words
from holdfast.errors import FixTheProgram, FixTheRecord, HoldfastError, NotThere
from holdfast.state.plain import KEY_TYPES, json_of, key_of, plain
from holdfast.times import now_ms

if TYPE_CHECKING:
    from holdfast.log.describe import Description, KeptStore
    from holdfast.log.manifest import Manifest
    from holdfast.log.storage import Storage
    from holdfast.log.verify import Tally
    from holdfast.runtime.view import StateView

OK, WRONG, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        asked = _parser().parse_args(arguments)
    except SystemExit as end:  # of argparse, which has said why
        return USAGE if end.code else OK
    try:
        code: int = asked.run(asked)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return 130
    except (FixTheProgram, FixTheRecord) as error:
        return _failed(str(error), USAGE)
    except HoldfastError as error:
        return _failed(str(error), WRONG)
    except OSError as error:
        return _failed(str(error), WRONG)
    except Exception as error:  # its message may hold state
        place = traceback.extract_tb(error.__traceback__)[-1]
        return _failed(
            f"{type(error).__qualname__} in {Path(place.filename).name}, line {place.lineno}: please report it", WRONG
        )


def storage_of(url: str) -> Storage:
    """The storage of a checkpoint; an object store is opened with what the environment says."""
    from holdfast.log.location import storage_at

    return storage_at(url)


# -- state -----------------------------------------------------------------------------------------------------------


def _state_ls(asked: argparse.Namespace) -> int:
    from holdfast.log.describe import stores_of

    head = _head(storage_of(asked.url), asked.url)
    stores = stores_of(head)
    if asked.json:
        return _say_json({"app": head.app, "version": head.version, "stores": stores})
    return _say(f"{head.app}, version {head.version:,}, {words.age(head.time_ms, now_ms())}", "", *_store_lines(stores))


def _state_get(asked: argparse.Namespace) -> int:
    key = key_of(asked.key, asked.key_type)
    view = _view(asked)
    state = view.get(key)
    if state is None:
        raise NotThere(
            f"store {asked.store} has no state for that {type(key).__name__} at version {view.version}; the type of a key "
            "counts: see --key-type"
        )
    if asked.json:
        return _say_json({"version": view.version, "store": asked.store, "key": plain(key), "state": plain(state)})
    width = max(len(repr(name)) for name in state)
    return _say(
        f"{key!r} in store {asked.store}, version {view.version:,}",
        "",
        *(f"{name!r:<{width}}  {_shown(value, asked.raw)}" for name, value in state.items()),
    )


def _state_items(asked: argparse.Namespace) -> int:
    from holdfast.export import line_of

    for key, state in islice(_view(asked).items(), asked.limit):
        if asked.json:
            _say(line_of(key, state))
        else:
            inner = ", ".join(f"{name!r}: {_shown(value, asked.raw)}" for name, value in state.items())
            _say(f"{key!r:<20}  {{{inner}}}")
    return OK


def _state_export(asked: argparse.Namespace) -> int:
    from holdfast.export import format_of, write_lines, write_parquet

    path = Path(asked.to)
    form = format_of(path, asked.format)
    view = _view(asked)
    items = view.items()
    begun = list(islice(items, 1))  # now it is decided which version it is
    everything = _counted(chained(begun, items))
    if form == "parquet":
        count = write_parquet(path, everything, {"store": asked.store, "version": str(view.version)})
    else:
        count = write_lines(path, everything)
    size = path.stat().st_size
    if asked.json:
        return _say_json(
            {
                "file": asked.to,
                "format": form,
                "store": asked.store,
                "version": view.version,
                "keys": count,
                "bytes": size,
            }
        )
    return _say(
        f"{words.counted(count, 'key')} of store {asked.store} at version {view.version:,}: {asked.to}, {words.size(size)}"
    )


def _view(asked: argparse.Namespace) -> StateView:
    """A view of the store that was asked for, with the codec that it was written with."""
    from holdfast.log.describe import stores_of
    from holdfast.log.manifest import Chain
    from holdfast.runtime.view import StateView
    from holdfast.state.codecs import Codec, JsonCodec, Undecoded
    from holdfast.state.python_codec import PythonCodec

    storage = storage_of(asked.url)
    head = _head(storage, asked.url)
    if head.kind == "restoring":
        sys.stderr.write("holdfast: the state is being restored from Kafka and is not whole yet\n")
    stores = {store.name: store for store in stores_of(head)}
    if asked.store not in stores:
        raise NotThere(
            f"no store {asked.store!r}; there {'is' if len(stores) == 1 else 'are'} {', '.join(stores) or 'none'}"
        )
    written = stores[asked.store].codec or JsonCodec.name
    known: dict[str, Codec] = {codec.name: codec for codec in (JsonCodec(), PythonCodec())}
    if written not in known and not asked.raw:
        raise NotThere(
            f"store {asked.store} was written with the codec {written}, which its program has and this command has not: "
            "--raw shows the bytes"
        )
    return StateView(Chain(storage), asked.store, Undecoded(written) if asked.raw else known[written])


# -- checkpoint ------------------------------------------------------------------------------------------------------


def _checkpoint_describe(asked: argparse.Namespace) -> int:
    from holdfast.log.describe import describe

    found = describe(storage_of(asked.url))
    if found is None:
        raise _no_checkpoint(asked.url)
    return _say_json(found) if asked.json else _say(*_description_lines(found, now_ms()))


def _description_lines(found: Description, now_ms: int) -> Iterator[str]:
    yield f"{found.app}, instance {found.instance}"
    yield ""
    first, last = found.first, found.last
    facts = {
        "versions": f"{first.version:,} to {last.version:,}",
        "first": f"{words.moment(first.time_ms)}, {words.age(first.time_ms, now_ms)}, {first.kind} by {first.holder}",
        "last": f"{words.moment(last.time_ms)}, {words.age(last.time_ms, now_ms)}, {last.kind} by {last.holder}",
        "state": f"{words.counted(found.keys, 'key')}, {words.size(found.bytes)}, since version {found.base:,}",
        "source": found.source,
        "position": "Spark keeps it" if found.position is None else _position(found.position),
        "delivered": _delivered(found),
        "watermark": "none" if found.watermark_ms is None else words.moment(found.watermark_ms),
    }
    times = [words.moment(time) for time in found.event_ms if time is not None]
    if times:
        facts["event time"] = f"up to {', '.join(times)}"
    if found.spark is not None:
        facts["query"] = f"{found.spark.query}, batch {found.spark.batch:,}"
    for name, fact in facts.items():
        yield f"{name:<10}  {fact}"
    yield ""
    yield from words.columns(
        ("stage", "partitions", "keys", "size", "stores"),
        [(s.name, s.partitions, s.keys, words.size(s.bytes), ", ".join(s.stores) or None) for s in found.stages],
    )
    yield ""
    yield from words.columns(
        ("partition", "stage", "keys", "size"),
        [(str(part.partition), part.stage, part.keys, words.size(part.bytes)) for part in found.partitions],
    )
    if found.stores:
        yield ""
        yield from _store_lines(found.stores)
    if found.sinks:
        yield ""
        yield from words.columns(("sink", "schema"), [(sink.id, sink.schema) for sink in found.sinks])
    yield ""
    yield from words.columns(
        ("files", "number", "size"), [(one.name, one.files, words.size(one.bytes)) for one in found.files]
    )


def _position(position: dict[str, Any]) -> str:
    return ", ".join(f"{name} {json_of(value)}" for name, value in position.items())


def _delivered(found: Description) -> str:
    upto = "nothing yet" if found.delivered is None else f"up to version {found.delivered:,}"
    return f"{upto}; version {found.last.version:,} has output that is not" if found.is_waiting else upto


def _store_lines(stores: Iterable[KeptStore]) -> list[str]:
    rows = [
        (
            store.name,
            store.stage or "of an earlier program",
            store.partitions,
            store.codec,
            store.keys,
            None if store.bytes is None else words.size(store.bytes),
            store.changelog,
        )
        for store in stores
    ]
    return words.columns(("store", "stage", "partitions", "codec", "keys", "size", "changelog"), rows)


def _checkpoint_verify(asked: argparse.Namespace) -> int:
    from holdfast.log.verify import Verification

    storage = storage_of(asked.url)
    progress = _Progress()
    verification = Verification(storage, lambda tally: progress.show(_reading(tally)))
    findings = []
    for finding in verification.findings():
        if asked.json:
            findings.append(finding)
        else:
            progress.clear()
            _say(f"{finding.kind}: {finding.message}")
    progress.clear()
    tally = verification.tally
    if tally.last is None and not tally.damaged:
        raise _no_checkpoint(asked.url)
    if asked.json:
        _say_json({"is_whole": not tally.damaged, "findings": findings, "read": tally})
    else:
        _say(*_tally_lines(tally))
    return WRONG if tally.damaged else OK


def _tally_lines(tally: Tally) -> Iterator[str]:
    which = "" if tally.first is None else f" ({tally.first:,} to {tally.last:,})"
    yield f"read {words.counted(tally.versions, 'version')}{which}, {words.counted(tally.files, 'file')}, {words.size(tally.bytes)}"
    if tally.counters == "not recomputed":
        yield "the numbers of keys and bytes were not recomputed"
    if tally.orphans:
        yield f"{words.counted(tally.orphans, 'orphan')}, {words.size(tally.orphan_bytes)}: they do no harm"
    yield f"{words.counted(tally.damaged, 'problem')}" if tally.damaged else "nothing is wrong"


def _reading(tally: Tally) -> str:
    return f"{tally.versions:,} of {tally.to_read:,} versions, {words.size(tally.bytes)}"


# -- what the commands share -----------------------------------------------------------------------------------------


def _head(storage: Storage, url: str) -> Manifest:
    from holdfast.log.manifest import Chain

    head = Chain(storage).head()
    if head is None:
        raise _no_checkpoint(url)
    return head


def _no_checkpoint(url: str) -> NotThere:
    return NotThere(
        f"there is no checkpoint at {url}: nothing in commits/. That of an application is <state_dir>/<name>/checkpoint, or "
        "where its Persistence says"
    )


def _counted(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    progress = _Progress()
    for count, item in enumerate(items, 1):
        yield item
        progress.show(f"{count:,} keys")
    progress.clear()


class _Progress:
    """One live line on a terminal; nothing elsewhere."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._said = 0.0

    def show(self, line: str) -> None:
        if self._is_live and time.monotonic() - self._said > 0.2:
            self._said = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._said:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._said = 0.0


def _shown(value: Any, raw: bool) -> str:
    """A value as Python writes it; the bytes of a codec in base64."""
    if raw and type(value) is bytes:
        from base64 import b64encode

        return f"base64:{b64encode(value).decode()}"
    return repr(value)


def _say(*lines: str) -> int:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return OK


def _say_json(value: Any) -> int:
    import msgspec

    return _say(msgspec.json.encode(value).decode())


def _failed(message: str, code: int) -> int:
    sys.stderr.write(f"holdfast: {' '.join(message.split())}\n")
    return code


# -- the words of the command line -------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    from holdfast import __version__

    parser = argparse.ArgumentParser(
        prog="holdfast", description="Look at the state and the checkpoint of an application."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    rooms = parser.add_subparsers(required=True, metavar="state | checkpoint")
    state = rooms.add_parser("state", help="what is in a checkpoint").add_subparsers(required=True, metavar="command")
    checkpoint = rooms.add_parser("checkpoint", help="the checkpoint itself").add_subparsers(
        required=True, metavar="command"
    )

    _command(state, "ls", _state_ls, "the stores")
    get = _command(state, "get", _state_get, "the state of a key")
    get.add_argument("key", metavar="KEY")
    get.add_argument(
        "--key-type",
        choices=KEY_TYPES,
        default="str",
        help='what KEY is (str); bytes: their text; hex: bytes; json: also tuples, as ["ann", 1]',
    )
    items = _command(state, "items", _state_items, "every key and its state")
    items.add_argument("--limit", type=_limit, metavar="N", help="the first N only, in no particular order")
    export = _command(state, "export", _state_export, "the state as a file")
    export.add_argument(
        "--to", required=True, metavar="FILE", help="it appears when it is whole, and replaces one that is there"
    )
    export.add_argument("--format", choices=("jsonl", "parquet"), help="by default what FILE ends with")
    for command in (get, items, export):
        command.add_argument("--store", default="default", help="the name of the store (default)")
        command.add_argument(
            "--raw", action="store_true", help="values as the bytes that the store's codec wrote, in base64"
        )

    _command(checkpoint, "describe", _checkpoint_describe, "versions, positions, stores, partitions, sizes")
    _command(checkpoint, "verify", _checkpoint_verify, "read everything and name what is wrong")
    return parser


def _command(room: Any, name: str, run: Callable[[argparse.Namespace], int], says: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = room.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
    parser.add_argument(
        "url", metavar="URL", help="the checkpoint: a path, or a URL with file://, s3://, gs:// or az://"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)
    return parser


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("a number of keys is needed")
    return int(text)
