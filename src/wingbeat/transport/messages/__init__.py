"""Messages between processes of a job, in several traffic classes over all interfaces. No torch.

>>> from wingbeat.transport.messages import open_mailbox
"""

from wingbeat.transport.messages.connect import open_mailbox
from wingbeat.transport.messages.frames import Limits, Message, Posted
from wingbeat.transport.messages.mailbox import Mailbox

__all__ = ["Limits", "Mailbox", "Message", "Posted", "open_mailbox"]
