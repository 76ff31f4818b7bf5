"""Parameter servers: processes that sum what all workers push, and send it back.

No torch is loaded but for codecs (`coded`), and to apply an optimizer (`applying`) and for small
values of it (`values`).
"""
