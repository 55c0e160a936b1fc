"""Every page of results, rendered from its rows.

    python benchmarks/pages.py write [PAGE ...]     write pages anew; all where none is named
    python benchmarks/pages.py check                exit code 1 where a page differs from its rows

The script behind a page has a function `page(rows_file)`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# The page, without its date and ending -> the script that renders it.
SCRIPTS = {
    "coverage_x86_64_2core": "capture/coverage_page.py",
    "fidelity_h200": "fidelity.py",
    "fidelity_x86_64_2core": "fidelity.py",
    "generalise_x86_64_2core": "learning/generalise.py",
    "hosts_h200": "gpu/hosts.py",
    "learn_measured_h200": "gpu/learn_measured.py",
    "learning_throughput": "learning/throughput.py",
    "learning_tuning_x86_64_2core": "learning/tuning.py",
    "learning_x86_64": "learning/curves.py",
    "microbatches_simulated_x86_64_2core": "microbatches/simulated_page.py",
    "offload_h200": "gpu/offload.py",
    "peak_memory_h200": "gpu/peak_memory.py",
    "placers_x86_64_2core": "placers.py",
    "placeto_x86_64_2core": "learning/placeto_page.py",
    "really_run_x86_64_2core": "microbatches/really_run_page.py",
    "simulator_x86_64_2core": "speed/simulator.py",
    "stg_x86_64_2core": "stg.py",
    "train_offload_h200": "gpu/train_offload.py",
}


def pages() -> list[Path]:
    """All committed pages."""
    return sorted(RESULTS.glob("*.md"))


def script_of(page: Path) -> Path:
    """The script that renders a page."""
    return HERE / SCRIPTS[page.stem.rpartition("_")[0]]


def render(page: Path) -> str:
    """The text of a page, from the rows beside it."""
    text: str = load(script_of(page)).page(page.with_suffix(".jsonl"))
    return text


def load(script: Path) -> ModuleType:
    """A script as a module, wherever Python was started."""
    for folder in (HERE, script.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"page_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    match sys.argv[1:]:
        case ["write", *names]:
            for page in [RESULTS / Path(name).name for name in names] or pages():
                page.write_text(render(page))
            return 0
        case ["check"]:
            wrong = [page.name for page in pages() if page.read_text() != render(page)]
            print("\n".join(wrong) or "every page equals its rows")
            return 1 if wrong else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
