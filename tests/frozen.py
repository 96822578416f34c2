"""What this process has loaded by now stays: the garbage collector does not look at it again.

Imported last by the process that ranks and commands are forked from: each of them collects after its second step, and
would walk all of torch and pytest.
"""

import gc

from heap import freeze

gc.collect()
freeze()
