"""The device of a rank: streams, copies, graphs, pinned memory; and the cores and limits of the host that it shares."""
