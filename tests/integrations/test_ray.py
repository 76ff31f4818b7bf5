"""``docs/integrations/ray.md``: its functions train the same weights as Ray's DDP."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs/integrations/ray.md"


def both(config: dict[str, Any]) -> None:
    """Train as the page does, then as Ray does by itself; raises where weights differ."""
    import ray.train
    import torch
    from ray.train.torch import prepare_data_loader, prepare_model
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    page: dict[str, Any] = {}
    exec(config["code"], page)
    weights = page["train_func"](config)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10))
    ddp = prepare_model(model)
    assert type(ddp).__name__ == "DistributedDataParallel"
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    loader = prepare_data_loader(DataLoader(data, batch_size=32))
    for _ in range(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(weights[name]), value, rtol=1e-5, atol=1e-7)
    Path(config["done"], str(ray.train.get_context().get_world_rank())).touch()


def both_in_lightning(config: dict[str, Any]) -> None:
    """Train as the page does in Lightning, then by Ray's strategy; raises where weights differ."""
    import ray.train
    import torch
    from torch.testing import assert_close

    torch.set_num_threads(1)
    page: dict[str, Any] = {}
    exec(config["code"], page)
    weights = page["train_func"](config)
    page["OnRay"] = lambda _strategy: page["RayDDPStrategy"]()
    expected = page["train_func"](config)
    begin = page["Module"]().state_dict()
    for name, value in expected.items():
        assert_close(weights[name], value, rtol=1e-5, atol=1e-7)
        assert (value != begin[name].numpy()).any()
    Path(config["done"], str(ray.train.get_context().get_world_rank())).touch()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("block", "train"), [(0, both), (1, both_in_lightning)])
def test_the_pages_functions_train_what_rays_ddp_trains(
    block: int, train: Any, tmp_path: Path
) -> None:
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[block]
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # which workers have not
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        TorchTrainer(
            train,
            train_loop_config={"epochs": 2, "code": code, "done": str(tmp_path)},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=str(tmp_path / "ray")),
        ).fit()
    finally:
        ray.shutdown()
    assert {each.name for each in tmp_path.iterdir() if each.is_file()} == {"0", "1"}
