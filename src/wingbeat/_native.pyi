def sketch_encode(
    x: int,
    n: int,
    payload: int,
    bits: int,
    by_error: bool,
    ends: bool,
    residual: int,
    threads: int,
    /,
) -> None: ...
def sketch_decode(
    payload: int, n: int, out: int, bits: int, add: bool, threads: int, /
) -> None: ...
def topk_encode(
    x: int,
    n: int,
    payload: int,
    k: int,
    residual: int,
    velocity: int,
    momentum: float,
    threads: int,
    /,
) -> None: ...
def topk_decode(payload: int, n: int, out: int, k: int, add: bool, threads: int, /) -> None: ...
def best_merge(
    count: int,
    ready: int,
    first: int,
    encode: int,
    exchange: int,
    tie: float,
    width: int,
    room: int,
    growth: int,
    work: int,
    /,
) -> tuple[list[int], float, bool]: ...
def instructions() -> str: ...
def prefer_portable(on: bool, /) -> None: ...
