"""The training loop of Placeto on one problem, to be read from top to bottom.

The placer calls `begin` or `sample`, then `train`. A round takes some steps of all episodes, turns
their rewards into advantages, and updates the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roost.core.placement import Placement
from roost.learners.episodes import EpisodeSteps, returns
from roost.learners.rewards import standardised
from roost.placers import Evaluate
from roost.placers._placeto.episodes import PlacetoEpisodes, anywhere
from roost.placers._placeto.learner import PlacetoLearner

# A policy repeats itself if less than this share of its placements were new, in so many rounds.
_FEW_NEW = 0.25
_MOST_REPEATS = 3
# Learning ends if less than this share of the last placements were new, also those of new
# policies; and how fast old rounds are forgotten.
_NOTHING_NEW = 0.05
_FORGET = 0.1
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
        _, trials = episodes.run(learner.chooser(episodes), rng, episodes.num_steps)
        learner.num_trials += sum(trial.num_new for trial in trials)
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
    settings = learner.settings
    rng = learner.rng(learner.num_rounds)

    # Let the policy choose devices.
    if episodes.ended.all():
        episodes.restart(rng)
    num_steps = settings.steps or episodes.num_steps
    steps, trials = episodes.run(learner.chooser(episodes), rng, num_steps)

    reward = np.stack([trial.reward for trial in trials])
    lasting = np.stack([trial.lasting for trial in trials])

    # Count what is new.
    num_new = sum(trial.num_new for trial in trials)
    share_new = num_new / reward.size
    learner.num_rounds += 1
    learner.num_trials += num_new
    learner.fresh += _FORGET * (share_new - learner.fresh)
    learner.repeats = learner.repeats + 1 if share_new < _FEW_NEW else 0

    # Sum up the rewards that follow from each step.
    if settings.rewards == "terminal":
        # All reward comes with the last step: minus the cost at the end of the episode.
        trial_return = np.broadcast_to(-episodes.cost(episodes.outcome), reward.shape)
    else:
        # A trial counts at once; what follows from it only counts if it was not undone.
        trial_return = reward + returns(lasting, settings.discount) - lasting
    step_return = trial_return[[step.trial for step in steps]]

    # Compare them with the mean of that step in the last rounds.
    inputs = [step.input for step in steps]
    numbers = np.array([each.step for each in inputs])
    advantage = step_return - episodes.baseline.at(numbers)[:, None]
    episodes.baseline.add(numbers, step_return)
    if settings.normalise:
        advantage = standardised(advantage, least_spread=0.0)

    # Update the policy.
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.annealed(settings.rate)
    score, parts = learner.scorer(episodes, inputs)
    device = np.stack([step.device for step in steps])
    log_prob = np.stack([step.log_prob for step in steps])
    taken = EpisodeSteps.of(device, log_prob, advantage, learner.device)
    entropy_weight = learner.annealed(settings.entropy)
    figures = learner.update.apply(learner.optimizer, score, parts, taken, entropy_weight)
    return {
        **figures,
        "reward": float(reward.mean()),
        "mean": episodes.mean_step_time,
        "best": episodes.best_step_time,
    }
