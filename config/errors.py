"""The errors that kvcascade raises: one shallow tree, caught at either height.

A miss is never an error: lookups and loads return what there is. An error means misuse, a peer that breaks
the protocol, or a part that is unusable.
"""


class CascadeError(Exception):
    """Root of all errors that kvcascade raises on purpose."""


class ConfigError(CascadeError):
    """The operator's settings cannot be used; the message names the setting and what to change."""


class ProtocolError(CascadeError):
    """A frame or a request breaks the protocol; the message names the field."""


class Refused(CascadeError):
    """The daemon understood the request and will not do it: a lease of another attachment, a seed against its probe."""


class LayoutMismatch(CascadeError):
    """A KV tensor's layout, dtype or shape is not one that kvcascade can store without guessing."""


class TierUnavailable(CascadeError):
    """A tier cannot serve now (sick, closed, memory or permission missing); others go on."""


class DaemonUnavailable(CascadeError):
    """No daemon answered within the deadline. Engines treat it as a miss and go on."""
