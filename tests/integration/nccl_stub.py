"""The stub with NCCL over sockets, in the memory of the CPU: for machines without a GPU.

python -m tests.integration.nccl_stub --model DIR --port 8000 --transport nccl
"""

from functools import partial

import torch

from stage2_trainer.serve.stub import app
from tests.support.socket_communicator import SocketCommunicator

if __name__ == "__main__":
    app.main(partial(app.receiver, device=torch.device("cpu"), communicator=SocketCommunicator))
