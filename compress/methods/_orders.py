"""In which order columns are rounded; see `halfulp.compress.methods.gptq`."""

from typing import Literal

Order = Literal["none", "group", "static"]
ORDERS = ("none", "group", "static")
