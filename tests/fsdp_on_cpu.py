"""The program in processes that accelerate takes for GPUs: on CPUs it would leave FSDP out without a word."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate import DistributedType, PartialState
from torch.distributed import fsdp

import gpt_2048_rl as program

if __name__ == "__main__":
    begin, fully_shard, count = PartialState.__init__, fsdp.fully_shard, 0

    def as_gpu(self: PartialState, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    def counted(*arguments: Any, **options: Any) -> Any:
        global count
        count += 1
        return fully_shard(*arguments, **options)

    PartialState.__init__, fsdp.fully_shard = as_gpu, counted
    code = program.main()
    sys.stderr.write(f"calls of fully_shard: {count}\n")  # one write, which no other process splits
    sys.exit(code)
