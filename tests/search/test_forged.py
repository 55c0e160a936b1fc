"""A journal or a saved state that was forged is refused; it never reaches a compiled loop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# It forges each array of a journal in each way, and prints what came of it. In a process of its
# own: an array that is not checked can end it.
SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
import msgspec
from roost.errors import InputError
from roost.placers.genetic import Genetic
from roost.search.journal_lines import RoundLine, array_rows, rows_digest, state_of
from roost.search.solve import search
from roost.testing.problems import training_like
from roost.testing.tiny_problems import tiny_problem

placer, trials, kind, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
problem = tiny_problem(kind) if kind != "training" else training_like(40, 3)
chosen = Genetic(individuals=16) if placer == "genetic" else placer

def run():
    return search(problem, chosen, trials=trials, seed=2, journal=path, prove=False)

first = run()
again = run()
assert again.best.step_time == first.best.step_time, "the journal as it was is refused"
lines = path.read_bytes().splitlines()
decoder = msgspec.json.Decoder(RoundLine)

def forgeries(array):
    yield "missing", None
    yield "longer", np.concatenate([array.ravel(), array.ravel(), array.ravel()[:1]])
    yield "empty", array.ravel()[:0]
    if array.dtype.kind == "f":
        yield "nan", np.full_like(array, np.nan)
        yield "below", np.full_like(array, -1e9)
    elif array.dtype.kind == "i":
        yield "beyond", np.full_like(array, 2**31 - 1)
        yield "far", np.full(array.shape, 2**62)
        yield "below", np.full_like(array, -7)
    yield "kind", array.astype(np.float64) if array.dtype.kind != "f" else array.astype(np.int64)

# Other windows and priorities, which are as good as these.
VALID = {("0.window", "longer"), ("0.window", "beyond"), ("windows", "beyond"), ("priorities", "below")}
seen, forged, wrong = set(), 0, []
for number, line in enumerate(lines):
    if not line.startswith(b'{"row":"round"'):
        continue
    row = decoder.decode(line)
    state = state_of(row)
    for name, array in state.items():
        if (row.placer, row.what, name) in seen or name[0] in "1234567":
            continue  # the arrays of the first chain stand for those of all
        seen.add((row.placer, row.what, name))
        for way, other in forgeries(array):
            if (name, way) in VALID:
                continue
            changed = {key: value for key, value in state.items() if key != name}
            if other is not None:
                changed[name] = other
            row.state = array_rows(changed)
            row.digest = rows_digest(row.state)
            path.write_bytes(b"\\n".join([*lines[:number], msgspec.json.encode(row), *lines[number + 1:], b""]))
            forged += 1
            try:
                run()
                wrong.append(f"{row.placer} {row.what} {name} {way}: accepted")
            except InputError as error:
                if "trials.jsonl" not in str(error) or repr(name) not in str(error):
                    wrong.append(f"{row.placer} {row.what} {name} {way}: {error}")
            except Exception as error:
                wrong.append(f"{row.placer} {row.what} {name} {way}: {error!r}")
print(json.dumps({"forged": forged, "arrays": len(seen), "wrong": wrong}))
"""


@pytest.mark.parametrize(
    ("placer", "trials", "kind", "arrays"),
    [
        ("annealing", 1500, "training", 9),
        ("annealing", 1500, "streamed", 9),
        ("genetic", 400, "training", 4),
        ("auto", 6000, "training", 9),
    ],
)
def test_every_array_of_a_forged_journal_is_checked(
    tmp_path: Path, placer: str, trials: int, kind: str, arrays: int
) -> None:
    command = [sys.executable, "-c", SCRIPT, placer, str(trials), kind]
    path = str(tmp_path / "trials.jsonl")
    done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found = json.loads(done.stdout)
    assert not found["wrong"], "\n".join(found["wrong"])
    assert found["arrays"] >= arrays
