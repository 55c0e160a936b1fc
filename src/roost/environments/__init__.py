"""Problem -> environment: placing group by group, for reinforcement learning, with the interface of
Gymnasium.

Importing this registers `roost/Placement-v0`;
`gymnasium.make("roost.environments:roost/Placement-v0", ...)` does both. `placement.py` runs one
episode at a time, `vector.py` many at once; both follow the rules in `_episodes.py`.
"""

from __future__ import annotations

from roost.errors import MissingExtra

try:
    import gymnasium
except ImportError as error:
    raise MissingExtra("gymnasium", "gym") from error

ID = "roost/Placement-v0"

if ID not in gymnasium.registry:
    gymnasium.register(
        ID,
        entry_point="roost.environments.placement:PlacementEnvironment",
        vector_entry_point="roost.environments.vector:VectorEnvironment",
    )
