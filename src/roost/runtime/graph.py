"""The official home of the graph runtime, for code outside the package.

`GraphRuntime` runs a captured step op by op, and `verify` compares it with the unplaced model.
"""

from roost.runtime.ops.run import GraphRuntime as GraphRuntime
from roost.runtime.ops.verify import verify as verify
from roost.runtime.step.differences import Verification as Verification
