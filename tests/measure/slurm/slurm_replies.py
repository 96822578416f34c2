"""What `squeue` and `sacct` print."""

from __future__ import annotations

SQUEUE = """\
12_0|RUNNING|1:05|n[1-2]|None
12_1|PENDING|0:00||Resources
13|COMPLETING|1-02:00:00|n1|None
12_2|NODE_FAIL|0:09|n2|None
14|RUNNING|INVALID|n1|None
nonsense
"""
SACCT = """\
12_3|FAILED|1:0|40|n1
12_3.batch|FAILED|1:0|40|n1
12_3.0|OUT_OF_MEMORY|0:125|39|n1
12_4|CANCELLED by 1000|0:9|3|n2
12_5|COMPLETED|0:0|60|n[1-2]
12_6|PENDING|0:0|0|None assigned
"""
