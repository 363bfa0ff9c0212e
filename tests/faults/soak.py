"""Random faults under load, for so many minutes; then everything is compared with a fold over the input.

    python tests/faults/soak.py [minutes] [seed]

One life of the program follows the other on the same checkpoint. All of them have a storage that is slow and fails, and a clock
that jumps; what else happens is drawn, every kind at least once. Ends with a table, and with 1 if anything was lost, doubled or
wrong, or if a kind of fault has not happened.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from damage import rotted
from disks import NoMount, full, small_disk
from life import Life
from machine import NAME, Machine
from orders import fold
from program import claim

from holdfast import failpoints
from holdfast.log import paths
from holdfast.log.snapshot import versions

EVERY, KEEP = 5, 2
SAYS_S = 10.0
"""Between two lines of progress."""
BY_THEMSELVES = ("slow storage", "failing storage", "lost answer", "clock jump")
"""What happens in every life."""
EXPECTED = ("StorageFull", "StorageFailed", "JobFailed", "Fenced", "ZombieTask")
"""What may end a life, by the names of the errors."""


class Soak:
    """The machine, what happened to it, and what is drawn next."""

    def __init__(self, home: Path, choice: random.Random, *, has_disk: bool) -> None:
        self.home = home
        self.machine = Machine(home, every=EVERY, keep=KEEP)
        self.happened: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self._choice = choice
        self._kinds: dict[str, Callable[[], None]] = {
            "kill": self.kill,
            "kill in a snapshot": self.kill_in_a_snapshot,
            "lost local disk": self.lose_disk,
            "damaged snapshot": self.damage_snapshot,
            "damaged local store": self.damage_store,
            "run that slept": self.sleep,
        }
        if has_disk:
            self._kinds["full disk"] = self.fill_disk
        self.kinds = (*self._kinds, *BY_THEMSELVES)
        self._next: list[str] = []

    def fault(self) -> None:
        """Inject one; every kind comes once before any comes again."""
        if not self._next:
            self._next = self._choice.sample(list(self._kinds), len(self._kinds))
        kind = self._next.pop()
        self._kinds[kind]()
        self.happened[kind] += 1

    def is_through(self) -> bool:
        """Whether every kind has happened."""
        noted = self.noted()
        return all(self.happened[kind] or noted[kind] for kind in self.kinds)

    def noted(self) -> Counter[str]:
        file = self.home / "happened"
        return Counter(file.read_text().split("\n")[:-1]) if file.exists() else Counter()

    # -- lives ---------------------------------------------------------------------------------------------------------

    def life(self, *arguments: object) -> Life:
        seed = self._choice.randrange(2**32)
        return Life(self.home, "--every", EVERY, "--keep", KEEP, "--disturbed", seed, "--batches", 10**9, *arguments)

    def version(self) -> int:
        names = self.machine.storage.names(paths.COMMITS)
        return paths.version_of(names[-1]) if names else -1

    def work(self, life: Life, most: int = 40) -> None:
        """Let a life commit some versions, unless it ends before."""
        wanted = self.version() + self._choice.randint(1, most)
        limit = time.monotonic() + 20
        while self.version() < wanted and life.is_alive() and time.monotonic() < limit:
            time.sleep(0.01)

    def finish(self, life: Life) -> None:
        """Kill it, if it has not ended in a way that was to be expected."""
        if life.is_alive():
            life.process.kill()
            life.process.wait()
            return
        if life.process.returncode < 0:
            return
        ended = [name for name in EXPECTED if f"holdfast.errors.{name}:" in life.said()]
        if not ended:
            raise SystemExit(f"a life ended by itself ({life.process.returncode}):\n{life.said()}")
        self.endings[ended[-1]] += 1

    # -- faults --------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        while True:
            with self.life() as life:
                self.work(life)
                time.sleep(self._choice.uniform(0, 0.05))
                was_alive = life.is_alive()
                self.finish(life)
            if was_alive:
                return

    def kill_in_a_snapshot(self) -> None:
        claim(self.home).unlink(missing_ok=True)
        while not claim(self.home).exists():
            point = self._choice.choice(failpoints.SNAPSHOT_POINTS)
            with self.life("--dies-at", f"{point}:{self._choice.randint(1, 2)}") as life:
                self.work(life, 40)
                self.finish(life)

    def lose_disk(self) -> None:
        self.kill()
        while not self.machine.local.exists():
            self.kill()
        shutil.rmtree(self.machine.local)

    def damage_snapshot(self) -> None:
        """The list of the newest one is cut short or gone; what it shares with later ones stays."""
        while len(versions(self.machine.storage)) < 2:
            self.kill()
        victim = self.machine.checkpoint / paths.snapshot(versions(self.machine.storage)[-1])
        if self._choice.random() < 0.5:
            victim.unlink()
        else:
            victim.write_bytes(victim.read_bytes()[:-1])
        if self._choice.random() < 0.5:
            shutil.rmtree(self.machine.local, ignore_errors=True)  # it may be lost already

    def damage_store(self) -> None:
        files: list[Path] = []
        while not files:
            self.kill()
            files = [path for path in self.machine.local.glob("*/*/slot-*/*") if path.is_file() and path.stat().st_size]
        victim = self._choice.choice(files)
        data = victim.read_bytes()
        if victim.suffix == ".sst" and self._choice.random() < 0.3:
            victim.write_bytes(data[: self._choice.randrange(len(data))])
        else:
            rotted(victim, self._choice.randrange(len(data)))

    def fill_disk(self) -> None:
        while True:
            with self.life() as life:
                self.work(life, 4)
                with full(self.home / NAME, self._choice.randrange(8)):
                    limit = time.monotonic() + 5
                    while life.is_alive() and time.monotonic() < limit:
                        time.sleep(0.02)
                was_met = "No space left" in life.said()
                self.finish(life)
            if was_met:
                return

    def sleep(self) -> None:
        """A run is stopped, another goes on, and the first wakes up."""
        while True:
            with self.life() as sleeper:
                self.work(sleeper)
                was_alive = sleeper.is_alive()
                if was_alive:
                    sleeper.freeze()
                    self.kill()
                    sleeper.thaw()
                    limit = time.monotonic() + 20
                    while sleeper.is_alive() and time.monotonic() < limit:
                        time.sleep(0.02)
                self.finish(sleeper)
            if was_alive:
                return


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**32)
    print(f"soak of {minutes:g} minutes, seed {seed}", flush=True)
    memory = Path("/dev/shm")
    with ExitStack() as stack:
        place = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="holdfast-soak-", dir=memory if memory.is_dir() else None)
        )
        home = Path(place) / "home"
        has_disk = True
        try:
            stack.enter_context(small_disk(home / NAME, megabytes=64))
        except NoMount as refused:
            has_disk = False
            print(f"no full disks: {refused}")
        return soak(Soak(home, random.Random(seed), has_disk=has_disk), 60 * minutes)


def soak(soak: Soak, seconds: float) -> int:
    began = said = time.monotonic()
    while time.monotonic() < began + seconds or not soak.is_through():
        soak.fault()
        if time.monotonic() > said + SAYS_S:
            said = time.monotonic()
            faults = sum(soak.happened.values())
            print(
                f"{said - began:4.0f} s of {seconds:.0f}: {soak.version()} batches, {faults} faults injected",
                flush=True,
            )
    soak.machine.run(2 * EVERY)  # nobody disturbs these
    return table(soak)


def table(soak: Soak) -> int:
    machine = soak.machine
    taken = machine.taken
    totals, rows = fold(taken)
    seen = Counter(row["n"] for row in machine.shelf.rows())
    lost = taken - len(seen)
    doubled = sum(seen.values()) - len(seen)
    expected = {row["n"]: row["total"] for row in rows}
    wrong = sum(expected.get(row["n"]) != row["total"] for row in machine.shelf.rows())
    state = machine.state()
    wrong += sum(state.get(user) != total for user, total in totals.items()) + len(state.keys() - totals.keys())
    damage = machine.damage()
    happened = soak.happened + soak.noted()
    lines = [(kind, happened[kind]) for kind in soak.kinds]
    lines += [("batches", soak.version()), ("records", taken)]
    lines += [("lost", lost), ("doubled", doubled), ("wrong values", wrong), ("damage that verify finds", len(damage))]
    print()
    for name, number in lines:
        print(f"{name:<28}{number:>12,}")
    print("runs ended by", ", ".join(f"{name} {times}" for name, times in soak.endings.items()) or "kills alone")
    for finding in damage:
        print(finding.message)
    missing = [kind for kind in soak.kinds if not happened[kind]]
    if missing:
        print("never happened:", ", ".join(missing))
    return int(bool(lost or doubled or wrong or damage or missing))


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    sys.exit(main())
