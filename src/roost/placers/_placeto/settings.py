"""The settings of Placeto: the paper's as far as known, and others that need fewer trials.

`placeto.py` explains both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from roost.placers._shared.setting_checks import check_choice, check_whole


@dataclass(frozen=True)
class PlacetoSettings:
    """The settings of one variant of Placeto."""

    most_groups: int = 300
    episodes: int = 8  # side by side
    steps: int | None = None  # between two updates; None: an episode
    start: str = "random"  # or "best": the best placement of the placers in `starts`
    starts: tuple[str, ...] = ("single", "expert", "scotch")
    # An episode begins at the "start" of the run, at the "best" placement so far, or it goes on
    # from the end of the last episode ("go_on").
    restart: str = "start"
    order: str = "topological"  # of the visits; or "reversed", or "random"
    # Order in which a placement is tried: "rank", "program", "fifo", or "listed": an order made
    # for its devices.
    judged: str = "rank"
    trial_every: int | None = 1  # steps; None: one trial at the end of an episode
    undo: bool = False  # the moves since the last trial, if they make the placement worse
    remember: bool = False  # placements that were tried: they are not tried again
    rewards: str = "improvement"  # or "terminal"
    relative: bool = False  # rewards are of the logarithm of the step time
    penalty: float = 24.0  # step times for as many missing bytes as an average device has
    discount: float = 1.0
    baseline_rounds: int = 10
    normalise: bool = False  # advantages
    # Embed the groups at every "step", or once for each "update", from features that do not change.
    embed: str = "step"
    device_features: bool = False  # show the policy what each device would mean for the group
    times_every: int = 1  # steps between two looks at when the groups run
    rounds: int = 8  # of messages
    messages: bool = True
    pools: bool = True
    width: int = 8
    hidden: int = 32
    passes: int = 1  # over the steps of a round; from 2 on with a clipped ratio
    clip: float = 0.2
    most_norm: float = 1.25  # of a gradient
    most_kl: float = inf  # from the policy that made the steps: beyond, no further pass is made
    rate: tuple[float, float] = (1e-3, 1e-4)  # at the beginning, and after `horizon`
    entropy: tuple[float, float] = (1.0, 0.0)
    horizon: int = 5000  # trials, if the budget sets no number
    train_on: str = "cpu"  # cuda, cuda:N, or auto: a GPU if there is one
    refine: PlacetoSettings | None = None  # of every second policy

    def __post_init__(self) -> None:
        check_choice(self, "start", ("random", "best"))
        check_choice(self, "restart", ("start", "best", "go_on"))
        check_choice(self, "order", ("topological", "reversed", "random"))
        check_choice(self, "rewards", ("improvement", "terminal"))
        check_choice(self, "embed", ("step", "update"))
        check_whole(self, 1, "most_groups", "episodes", "times_every", "width", "hidden", "passes")
        check_whole(self, 1, "horizon")


_TUNED = PlacetoSettings(
    episodes=32,
    restart="best",
    judged="listed",
    trial_every=None,
    remember=True,
    relative=True,
    normalise=True,
    embed="update",
    device_features=True,
    times_every=1000,
    rounds=4,
    width=16,
    passes=4,
    rate=(1e-2, 3e-3),
    entropy=(0.02, 0.0),
)
_REFINE = replace(
    _TUNED,
    episodes=4,
    steps=16,
    trial_every=1,
    undo=True,
    discount=0.0,
    times_every=8,
    rate=(1e-3, 1e-3),
    entropy=(0.1, 0.02),
)
SETTINGS = {"paper": PlacetoSettings(), "tuned": replace(_TUNED, refine=_REFINE)}
