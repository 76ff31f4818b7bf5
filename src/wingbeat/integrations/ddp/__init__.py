"""Communication hooks for PyTorch's DistributedDataParallel: compression with error feedback.

::

    model = DistributedDataParallel(model)
    state = SketchState(model, bits=8)
    model.register_comm_hook(state, sketch_hook)

A hook adds the compression error to the next gradient (Canary, section 4.3; Deep Gradient
Compression, section 3). These residuals are kept by parameter name, so they survive the rebuilding
of DDP's buckets. Save them in checkpoints with ``state.state_dict()``.
"""

from wingbeat.integrations.ddp.hooks import sketch_hook, topk_hook, wire_hook
from wingbeat.integrations.ddp.state import SketchState, TopKState
from wingbeat.integrations.ddp.wire import WireState

__all__ = ["SketchState", "TopKState", "WireState", "sketch_hook", "topk_hook", "wire_hook"]
