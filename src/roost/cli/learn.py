"""`roost learn`: train a placer over a family of models, for graphs it has never seen."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost import __version__, catalog
from roost.cli import _console
from roost.cli._learning_progress import LearningProgress, baselines
from roost.cli._metrics import METRICS, Metrics
from roost.cli._text import plural
from roost.cli.place import _prepare
from roost.errors import InputError, UnknownName

if TYPE_CHECKING:
    from roost.core.arrays import Array
    from roost.core.graph import Graph
    from roost.core.problem import Problem

WEIGHTS = "policy.safetensors"
CARD = "card.json"
CHECKPOINT = "checkpoint.npz"
LOCK = ".lock"
_MOST_SECONDS = 1e9
_MOST_SEED = 2**62
_MOST_MADE_UP = 64
_LONG = ("settings", "problems")  # fields that are too long to quote
_SAVE_SECONDS = 10.0  # between two checkpoints
_TELL_SECONDS = 10.0  # between two lines of progress where there is no terminal


def learn(
    family: Annotated[
        str, typer.Option(metavar="NAME", help="A family of models: cifar10, nmt or ptb.")
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Write the weights and the rest here."),
    ],
    on: Annotated[
        str,
        typer.Option(metavar="CLUSTER,CLUSTER", help="Presets or cluster.toml files to learn for."),
    ],
    placer: Annotated[
        str,
        typer.Option(metavar="NAME", help="A placer that learns over a family: lister or placeto."),
    ] = "lister",
    graphs: Annotated[
        int, typer.Option(metavar="N", help="Members of the family to learn on, the first ones.")
    ] = 24,
    made_up: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Made-up machines for each graph, beside these: like them, at other speeds.",
        ),
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S",
            help="Seconds of learning, planned for one core. Capturing the graphs comes on top.",
        ),
    ] = 300.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Equal seeds give equal weights.")] = 0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write event files for TensorBoard.")
    ] = False,
    as_json: _console.AsJson = False,
) -> None:
    """Train a placer over a family of models.

    Writes policy.safetensors for roost place --weights, a card with the training data, and
    metrics.jsonl with the figures of every update. The work is planned before it starts, not by the
    clock. A run that was killed goes on when you give the same command again, and ends with the
    same weights.
    """
    chosen = _placer(placer)
    clusters = _clusters(on)
    if graphs < 1 or not 0 < seconds <= _MOST_SECONDS or not 0 <= seed < _MOST_SEED:
        raise InputError(
            f"--graphs {graphs}, --seconds {seconds} and --seed {seed}: at least 1, above 0 and "
            f"at most "
            f"{_MOST_SECONDS:g}, and from 0 to {_MOST_SEED - 1}"
        )
    if not 0 <= made_up <= _MOST_MADE_UP:
        raise InputError(f"--made-up {made_up}: from 0 to {_MOST_MADE_UP}")
    _check_family(family)
    _prepare(output, (WEIGHTS, CARD, CHECKPOINT, METRICS, LOCK))
    with _alone(output):
        problems = _problems(family, graphs, clusters, output, made_up)
        about = {
            "placer": placer,
            "settings": repr(chosen),
            "family": family,
            "graphs": graphs,
            "clusters": clusters,
            "made_up": made_up,
            "seconds": seconds,
            "seed": seed,
            "roost": __version__,
            # the files of clusters and graphs may change
            "problems": [problem.digest for problem in problems],
        }
        if (done := _finished(output, about)) is not None:
            _console.note(
                f"{output} already has the weights of this command; remove them to learn again"
            )
            _console.show_json(done) if as_json else None
            return
        facts = _train(chosen, problems, about, output, tensorboard)
    if as_json:
        _console.show_json(facts)
        return
    _console.show(
        f"{placer} learned on {plural(len(problems), 'problem')} ({family} on "
        f"{', '.join(clusters)})",
        "use it with:",
    )
    _console.console().print(
        f"roost place MODEL --on CLUSTER --placer {placer} --weights {facts['files']['weights']}",
        soft_wrap=True,
        highlight=False,
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder against other runs, whose files would mix. A kill ends the lock."""
    path = folder / LOCK
    try:
        file = path.open("ab")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = "another roost learn is writing to it; wait for it, or name another folder"
            if not isinstance(error, BlockingIOError):
                said = f"cannot be locked: {error.strerror or error}; name a folder on another disk"
            raise InputError(f"{folder}: {said}") from None
        yield


def _train(
    chosen: Any, problems: list[Problem], about: dict[str, Any], output: Path, tensorboard: bool
) -> dict[str, Any]:
    """Learn to the end and write all files. Returns the facts for --json."""
    from roost.placers import parts_of

    checkpoint = Checkpoint(output / CHECKPOINT, about)
    began = time.monotonic()
    progress = LearningProgress(about["placer"], parts_of(chosen), baselines(problems))
    with _watching(progress, output, checkpoint, tensorboard) as tell:
        tensors, more = chosen.learn(problems, about["seconds"], about["seed"], tell, checkpoint)
    card = {**about, **more}
    files = _write(output, about["placer"], tensors, card)
    checkpoint.done()
    return {**card, "files": files, "took": time.monotonic() - began}


def _finished(folder: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The card of the same command, if it has ended before."""
    import msgspec

    if (
        not (folder / CARD).is_file()
        or not (folder / WEIGHTS).is_file()
        or (folder / CHECKPOINT).exists()
    ):
        return None
    try:
        card = msgspec.json.decode((folder / CARD).read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return card if all(card.get(key) == value for key, value in about.items()) else None


def _placer(name: str) -> Any:
    from roost.placers import LearnsFamily

    chosen = catalog.find("placers", name)()
    if not isinstance(chosen, LearnsFamily):
        able = [each for each in catalog.own_names("placers") if _can_learn(each)]
        raise InputError(
            f"--placer {name}: does not learn over a family; these do: {', '.join(able)}"
        )
    return chosen


def _can_learn(name: str) -> bool:
    """True if the file of a placer has a method `learn`. The file is read, not imported."""
    return "    def learn(" in (catalog.ROOT / "placers" / f"{name}.py").read_text()


def _clusters(text: str) -> list[str]:
    from roost.presets import cluster

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InputError(f"--on {text!r}: names no cluster; write it as k80x2,k80x4")
    for name in names:
        cluster(name)
    return names


def _check_family(name: str) -> None:
    from roost import zoo

    if name not in (known := zoo.family_names()):
        raise UnknownName("family", name, known)


def _problems(
    family: str, count: int, clusters: list[str], output: Path, num_made_up: int = 0
) -> list[Problem]:
    """Every graph on every cluster, and on so many made-up machines. Graphs are kept in files."""
    import numpy as np

    from roost.cost_models import estimate
    from roost.presets import cluster
    from roost.presets.made_up import made_up

    kept = output / "graphs"
    if kept.exists() and not kept.is_dir():
        raise InputError(f"{kept}: is a file; Roost needs a folder of that name: move it away")
    kept.mkdir(exist_ok=True)
    graphs = []
    with _console.progress(f"capturing graphs of {family}") as tell:
        for number in range(count):
            graphs.append(_graph(family, number, kept / f"{family}_0_{number:03d}.json.gz"))
            tell(number + 1, count)
    problems = []
    for number, graph in enumerate(graphs):
        machines = [cluster(name) for name in clusters]
        for more in range(num_made_up):
            base = machines[(number + more) % len(clusters)]
            machines.append(made_up(base, np.random.default_rng([number, more])))
        problems += [estimate(graph, machine) for machine in machines]
    return problems


def _graph(family: str, number: int, path: Path) -> Graph:
    from roost import zoo
    from roost.core import formats
    from roost.core.graph import Graph

    if path.exists():
        graph: Graph = formats.load_as(Graph, path)
        return graph
    graph = zoo.member(family, number, 0)
    graph.save(path)
    return graph


@dataclass
class Checkpoint:
    """The file from which learning goes on after a kill. It belongs to one command."""

    path: Path
    about: Mapping[str, Any]
    seconds: float = _SAVE_SECONDS
    saved: float = field(default_factory=time.monotonic)
    metrics: Path | None = None

    def load(self) -> dict[str, Array] | None:
        """The last saved state, or None. Raises InputError if it is damaged or does not match."""
        import msgspec

        from roost.core.states import read_state

        if not self.path.exists():
            return None
        try:
            state = read_state(self.path)
            about = msgspec.json.decode(str(state.pop("about")), type=dict[str, Any])
            size = int(state.pop("metrics"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.path}: is no checkpoint of Roost ({error}); remove it to start again"
            ) from None
        self._check(about)
        if self.metrics is not None and self.metrics.exists():
            with self.metrics.open("r+b") as out:
                # what came after the state comes again
                out.truncate(min(size, self.metrics.stat().st_size))
        return state

    def _check(self, saved: Mapping[str, Any]) -> None:
        for name in {**self.about, **saved}:
            was = saved.get(name)
            now = self.about.get(name)
            if was != now:
                differs = (
                    f"{name} was {was!r}, not {now!r}"
                    if name not in _LONG
                    else f"its {name} differ"
                )
                raise InputError(
                    f"{self.path}: is of another command: {differs}; remove it, or name another "
                    f"folder"
                )

    def save(self, state: Mapping[str, Array]) -> None:
        """Write the state, if the last time is some seconds ago."""
        if time.monotonic() < self.saved + self.seconds:
            return
        import msgspec

        from roost.core.states import write_state

        has_metrics = self.metrics is not None and self.metrics.exists()
        size = self.metrics.stat().st_size if self.metrics is not None and has_metrics else 0
        about = msgspec.json.encode(dict(self.about)).decode()
        write_state(self.path, {**state, "about": about, "metrics": size})
        self.saved = time.monotonic()

    def done(self) -> None:
        self.path.unlink(missing_ok=True)


@contextmanager
def _watching(
    progress: LearningProgress, folder: Path, checkpoint: Checkpoint, tensorboard: bool
) -> Iterator[Any]:
    """A function that writes figures to files, and shows the progress."""
    metrics = Metrics(folder, tensorboard, going_on=checkpoint.path.exists())
    checkpoint.metrics = metrics.path
    out = _console.console(stderr=True)
    told = time.monotonic()
    with out.status(progress):

        def tell(figures: Mapping[str, float]) -> None:
            nonlocal told
            metrics.add(figures)
            progress.add(figures)
            if not out.is_terminal and time.monotonic() - told >= _TELL_SECONDS:
                told = time.monotonic()
                _console.note(progress.line())

        try:
            yield tell
        finally:
            metrics.close()


def _write(
    folder: Path, placer: str, tensors: Mapping[str, Array], card: Mapping[str, Any]
) -> dict[str, str]:
    import msgspec

    from roost.core.files import write_bytes
    from roost.policies.weights import save_weights

    save_weights(folder / WEIGHTS, placer.rpartition(":")[-1], tensors, card)
    write_bytes(
        folder / CARD, msgspec.json.format(msgspec.json.encode(dict(card)), indent=2) + b"\n"
    )
    _console.note(f"wrote {WEIGHTS}, {CARD} and {METRICS} to {folder}")
    return {
        "weights": str(folder / WEIGHTS),
        "card": str(folder / CARD),
        "metrics": str(folder / METRICS),
    }
