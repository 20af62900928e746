"""Reads a loader ahead and asks for features before they are needed; knows no Lightning.

Every tensor of a fetched batch carries a tag: which batch it belongs to and which leaf of it it is. The first call of
a frozen module shows by its tags which leaves feed it (its *route*); from then on these leaves are submitted when a
batch is fetched, and a later call with the very same tensors, unedited, is answered from what was requested. Anything
else is computed on the spot: slower, never wrong.
"""

from lightning_npu.lookahead.ahead import Ahead as Ahead
from lightning_npu.lookahead.ahead import Inputs as Inputs
from lightning_npu.lookahead.depth import Depth as Depth
from lightning_npu.lookahead.loop import Lookahead as Lookahead
from lightning_npu.lookahead.statistics import Statistics as Statistics
from lightning_npu.lookahead.tags import Tag as Tag
from lightning_npu.lookahead.tags import leaves as leaves
from lightning_npu.lookahead.tags import replace_leaves as replace_leaves
from lightning_npu.lookahead.view import View as View
from lightning_npu.lookahead.view import view_of as view_of
