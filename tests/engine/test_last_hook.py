"""The engine's hook on a parameter stays behind those of the user."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wingbeat.engine.last_hook import LastHook


def _noting(calls: list[str], name: str) -> Callable[[Any], None]:
    return lambda _param: calls.append(name)


def _run(param: nn.Parameter, calls: list[str]) -> list[str]:
    calls.clear()
    param.sum().backward()
    return list(calls)


def test_hooks_registered_before_and_after_come_first() -> None:
    param, calls = nn.Parameter(torch.ones(2)), list[str]()
    param.register_post_accumulate_grad_hook(_noting(calls, "before"))
    last = LastHook(param, _noting(calls, "last"))
    handle = param.register_post_accumulate_grad_hook(_noting(calls, "after"))
    param.register_post_accumulate_grad_hook(_noting(calls, "later"))
    assert _run(param, calls) == ["before", "after", "later", "last"]
    handle.remove()
    assert _run(param, calls) == ["before", "later", "last"]
    last.remove()
    assert _run(param, calls) == ["before", "later"]
    last.remove()  # once more is no error
    param.register_post_accumulate_grad_hook(_noting(calls, "new"))
    assert _run(param, calls) == ["before", "later", "new"]


def test_the_only_hook() -> None:
    param, calls = nn.Parameter(torch.ones(2)), list[str]()
    last = LastHook(param, _noting(calls, "last"))
    assert _run(param, calls) == ["last"]
    last.remove()
    assert _run(param, calls) == []


def _user_hook(_param: Any) -> None:
    """At module level, so that it can be pickled."""


def test_copies_have_the_users_hooks_only() -> None:
    param, calls = nn.Parameter(torch.ones(2)), list[str]()
    LastHook(param, _noting(calls, "last"))
    param.register_post_accumulate_grad_hook(_user_hook)
    hooks: Any = param._post_accumulate_grad_hooks
    assert list(copy.copy(hooks).values()) == [_user_hook]
    assert list(pickle.loads(pickle.dumps(hooks)).values()) == [_user_hook]
    assert len(hooks) == 2
