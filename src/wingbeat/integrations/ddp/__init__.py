"""Communication hooks for PyTorch's DistributedDataParallel: fewer bytes, with error feedback.

::

    model = DistributedDataParallel(model)
    state = SketchState(model, bits=8)
    model.register_comm_hook(state, sketch_hook)

What a hook does not send now it adds to the next gradient (Canary, section 4.3; Deep Gradient
Compression, section 3). That memory is kept by parameter name, so it survives DDP's own rebuilding
of buckets, and a checkpoint if it is saved with ``state.state_dict()``.
"""

from wingbeat.integrations.ddp.hooks import sketch_hook, topk_hook, wire_hook
from wingbeat.integrations.ddp.state import SketchState, TopKState
from wingbeat.integrations.ddp.wire import WireState

__all__ = ["SketchState", "TopKState", "WireState", "sketch_hook", "topk_hook", "wire_hook"]
