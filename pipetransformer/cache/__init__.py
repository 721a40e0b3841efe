"""AutoCache: activations at the boundary of the prefix, read instead of computed."""

from pipetransformer.cache.advance import Advance, advance
from pipetransformer.cache.controller import AutoCache
from pipetransformer.cache.device_tier import DeviceTier
from pipetransformer.cache.identity import digests_of_units
from pipetransformer.cache.reader import BatchReader, read_ahead
from pipetransformer.cache.shared import open_cache
from pipetransformer.cache.store import ActivationStore, StoreLayout
from pipetransformer.cache.views import settle_views, view_numbers

__all__ = [
    "ActivationStore",
    "Advance",
    "AutoCache",
    "BatchReader",
    "DeviceTier",
    "StoreLayout",
    "advance",
    "digests_of_units",
    "open_cache",
    "read_ahead",
    "settle_views",
    "view_numbers",
]
