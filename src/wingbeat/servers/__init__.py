"""Parameter servers: processes that sum what all workers push, and send it back.

No torch is loaded but for small values (`values`) and to apply an optimizer (`applying`).
"""
