"""The training loop of Placeto on one problem, to be read from top to bottom.

The placer calls `begin` or `sample`, then `train`. A round takes some steps of all episodes, turns
their rewards into advantages, and updates the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.learners.episodes import EpisodeSteps, returns
from roost.learners.rewards import standardised
from roost.placers import Evaluate
from roost.placers._placeto.episodes import EpisodeRecord, PlacetoEpisodes, anywhere
from roost.placers._placeto.learner import PlacetoLearner

# A policy repeats itself if less than this share of its placements were new, in so many rounds.
_FEW_NEW, _MOST_REPEATS = 0.25, 3
# Learning ends if less than this share of the last placements were new, also those of new
# policies; and how fast old rounds are forgotten.
_NOTHING_NEW, _FORGET = 0.05, 0.1
_SAMPLED = 16  # episodes side by side of a policy that was trained before


def begin(learner: PlacetoLearner, episodes: PlacetoEpisodes, starts: Sequence[Placement]) -> None:
    """Try the first placements: these starts, and random ones in the other episodes."""
    rng = learner.rng(-1)
    first = anywhere(episodes.units, rng, learner.settings.episodes)
    for row, placement in zip(first, starts, strict=False):
        row[:] = episodes.units.unit_devices(placement.device)
    episodes.begin(first, rng)
    learner.num_trials += len(first)


def sample(learner: PlacetoLearner, episodes: PlacetoEpisodes, count: int) -> None:
    """Run so many episodes of a trained policy from a random placement, without learning.

    They go a few at a time, each time from the best placement so far. One of them always takes the
    likeliest device.
    """
    rng = learner.rng(-1)
    episodes.begin(anywhere(episodes.units, rng, 1), rng)
    episodes.num_greedy = 1
    for first in range(0, count, _SAMPLED):
        few = replace(learner.settings, episodes=min(_SAMPLED, count - first))
        episodes.restart_at_best(few, rng)
        record = episodes.run(learner.chooser(episodes), rng, episodes.num_steps)
        learner.num_trials += record.new_trials
    episodes.num_greedy = 0
    episodes.restart_at_best(learner.settings, rng)


def train(learner: PlacetoLearner, episodes: PlacetoEpisodes, evaluate: Evaluate) -> None:
    """Learn round by round, until the budget is spent or hardly anything new is tried."""
    while (
        learner.fresh >= _NOTHING_NEW
        and not episodes.has_tried_all
        and evaluate.seconds_left > 0
        and evaluate.trials_left >= 1
    ):
        evaluate.note(train_round(learner, episodes))
        if learner.repeats >= _MOST_REPEATS:
            # Go on from the best placement with a policy that knows nothing.
            learner.start_phase(learner.phase + 1)
            episodes.restart_at_best(learner.settings, learner.rng(learner.num_rounds))
        evaluate.keep(lambda: {**learner.state(), **episodes.state()})


def train_round(learner: PlacetoLearner, episodes: PlacetoEpisodes) -> dict[str, float]:
    """One round: some steps of all episodes, and an update. Returns figures of it."""
    settings, rng = learner.settings, learner.rng(learner.num_rounds)

    # Let the policy choose devices.
    if episodes.ended.all():
        episodes.restart(rng)
    num_steps = settings.steps or episodes.num_steps
    record = episodes.run(learner.chooser(episodes), rng, num_steps)

    # Count what is new.
    num_tried = len(record.reward) * len(episodes.device)
    share_new = record.new_trials / num_tried
    learner.num_rounds += 1
    learner.num_trials += record.new_trials
    learner.fresh += _FORGET * (share_new - learner.fresh)
    learner.repeats = learner.repeats + 1 if share_new < _FEW_NEW else 0

    # Compare the return of each step with the mean of that step in the last rounds.
    steps = np.array([each.step for each in record.inputs])
    step_returns = _returns(episodes, record)
    advantage = step_returns - episodes.baseline.at(steps)[:, None]
    episodes.baseline.add(steps, step_returns)
    if settings.normalise:
        advantage = standardised(advantage, least_spread=0.0)

    # Update the policy.
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.annealed(settings.rate)
    score, parts = learner.scorer(episodes, record.inputs)
    chosen, log_probs = np.stack(record.chosen), np.stack(record.log_probs)
    steps_taken = EpisodeSteps.of(chosen, log_probs, advantage, learner.device)
    entropy_weight = learner.annealed(settings.entropy)
    update = learner.update.apply(learner.optimizer, score, parts, steps_taken, entropy_weight)
    return {
        **update,
        "reward": float(np.mean(record.reward)),
        "mean": episodes.mean_step_time,
        "best": episodes.best_step_time,
    }


def _returns(episodes: PlacetoEpisodes, record: EpisodeRecord) -> Array:  # [steps, episodes]
    """The reward that follows from each step."""
    settings = episodes.settings
    reward, lasting = np.stack(record.reward), np.stack(record.lasting)
    if settings.rewards == "terminal":
        # All reward comes with the last step: minus the cost at the end of the episode.
        found = np.broadcast_to(-episodes.cost(episodes.outcome), reward.shape)
    else:
        # A trial counts at once; what follows from it only counts if it was not undone.
        found = reward + returns(lasting, settings.discount) - lasting
    return np.asarray(found[record.trial])
