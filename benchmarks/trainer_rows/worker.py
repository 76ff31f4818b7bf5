"""One worker of a lab, for ``trainers.py``: ``worker.py FOLDER LIBRARY STRATEGY OPTIONS``.

Leaves ``ticks-RANK.json`` in the folder, and rank 0 the weights in ``weights.pt``. The library
``none`` measures a forward alone, into ``forward-RANK.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])

from trainer_rows.task import Task  # noqa: E402


def main() -> None:
    folder, library, strategy, options = sys.argv[1:]
    home, rank, size = Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    task = Task(rank, size, json.loads(options))
    if library == "none":
        (home / f"forward-{rank}.json").write_text(json.dumps(task.forward_seconds()))
        return
    model = importlib.import_module(f"trainer_rows.with_{library}").train(task, strategy)
    assert len(task.ticks) == task.iterations, f"{len(task.ticks)} iterations were made"
    begun = task.model().state_dict()
    assert any(not torch.equal(v, begun[k]) for k, v in model.state_dict().items()), "no training"
    (home / f"ticks-{rank}.json").write_text(json.dumps(task.ticks))
    if rank == 0:
        torch.save(model.state_dict(), home / "weights.pt")


if __name__ == "__main__":
    main()
