"""The stub with NCCL over sockets, in the memory of the CPU: for machines without a GPU.

python -m tests.integration.nccl_stub --model DIR --port 8000 --transport nccl
"""

import torch

from stage2_trainer.serve.stub import app
from stage2_trainer.sync.transports.receiver import Receiver
from tests.support.socket_communicator import SocketCommunicator

if __name__ == "__main__":
    app.main(lambda transport: Receiver(transport, torch.device("cpu"), SocketCommunicator))
