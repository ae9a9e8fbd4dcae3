"""Fake GPUs for a real kubelet: a device plugin (API deviceplugin/v1beta1) whose Allocate sets an environment variable.

The messages are declared here, field numbers as in the kubelet's api.proto, so that nothing has to be generated.
"""

import argparse
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from local_cluster.layout import KUBELET_STATE

logger = logging.getLogger(__name__)

FOLDER = KUBELET_STATE / "device-plugins"
KUBELET_SOCKET = FOLDER / "kubelet.sock"
SOCKET = FOLDER / "stage2-gpu.sock"
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"

Field = descriptor_pb2.FieldDescriptorProto
MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "Empty": {},
    "DevicePluginOptions": {"pre_start_required": (1, "bool"), "get_preferred_allocation_available": (2, "bool")},
    "RegisterRequest": {
        "version": (1, "string"),
        "endpoint": (2, "string"),
        "resource_name": (3, "string"),
        "options": (4, "DevicePluginOptions"),
    },
    "Device": {"ID": (1, "string"), "health": (2, "string")},
    "ListAndWatchResponse": {"devices": (1, "*Device")},
    "ContainerAllocateRequest": {"devices_ids": (1, "*string")},
    "AllocateRequest": {"container_requests": (1, "*ContainerAllocateRequest")},
    # A map is on the wire a repeated message of key and value.
    "Env": {"key": (1, "string"), "value": (2, "string")},
    "ContainerAllocateResponse": {"envs": (1, "*Env")},
    "AllocateResponse": {"container_responses": (1, "*ContainerAllocateResponse")},
}
"""Message → field → (number, type); `*` marks a repeated field. Only what this plugin reads or writes."""


def _message_types() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="deviceplugin.proto", package="v1beta1", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1beta1.{name}")) for name in MESSAGES}


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number)
    field.label = Field.LABEL_REPEATED if kind.startswith("*") else Field.LABEL_OPTIONAL
    scalar = {"string": Field.TYPE_STRING, "bool": Field.TYPE_BOOL}.get(kind.lstrip("*"))
    if scalar is None:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".v1beta1.{kind.lstrip('*')}"
    else:
        field.type = scalar


TYPES = _message_types()


class DevicePlugin:
    """Service v1beta1.DevicePlugin: `count` devices, always healthy, named GPU-0, GPU-1, …"""

    def __init__(self, count: int) -> None:
        self.device_ids = [f"GPU-{index}" for index in range(count)]
        self.stopped = threading.Event()

    def options(self, _request: Any, _context: Any) -> Any:
        """No call before a container starts, no preference among devices."""
        return TYPES["DevicePluginOptions"]()

    def list_and_watch(self, _request: Any, _context: Any) -> Iterator[Any]:
        """The devices, once; the stream stays open since the kubelet takes its end for the plugin's death."""
        devices = [TYPES["Device"](ID=device, health="Healthy") for device in self.device_ids]
        yield TYPES["ListAndWatchResponse"](devices=devices)
        self.stopped.wait()

    def allocate(self, request: Any, _context: Any) -> Any:
        """The environment that NVIDIA's plugin would answer: which devices a container may see."""
        return TYPES["AllocateResponse"](
            container_responses=[
                TYPES["ContainerAllocateResponse"](
                    envs=[TYPES["Env"](key=VISIBLE_DEVICES, value=",".join(sorted(container.devices_ids)))]
                )
                for container in request.container_requests
            ]
        )

    def serve(self, socket: Path) -> grpc.Server:
        """Start answering on a Unix socket."""
        methods = {
            "GetDevicePluginOptions": _unary(self.options, "Empty"),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self.list_and_watch,
                request_deserializer=TYPES["Empty"].FromString,
                response_serializer=TYPES["ListAndWatchResponse"].SerializeToString,
            ),
            "Allocate": _unary(self.allocate, "AllocateRequest"),
        }
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods),))
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        return server


def _unary(method: Any, request: str) -> Any:
    def serialize(message: Any) -> bytes:
        return bytes(message.SerializeToString())

    return grpc.unary_unary_rpc_method_handler(
        method, request_deserializer=TYPES[request].FromString, response_serializer=serialize
    )


def register(resource: str) -> None:
    """Register this plugin with the kubelet; raises grpc.RpcError if the kubelet does not listen."""
    request = TYPES["RegisterRequest"](version="v1beta1", endpoint=SOCKET.name, resource_name=resource)
    with grpc.insecure_channel(f"unix://{KUBELET_SOCKET}") as channel:
        call = channel.unary_unary(
            "/v1beta1.Registration/Register",
            request_serializer=TYPES["RegisterRequest"].SerializeToString,
            response_deserializer=TYPES["Empty"].FromString,
        )
        call(request, timeout=5, wait_for_ready=False)


def run_once(resource: str, count: int) -> None:
    """Serve until the kubelet restarts, which deletes every plugin's socket."""
    while not KUBELET_SOCKET.exists():
        time.sleep(0.1)
    plugin = DevicePlugin(count)
    server = plugin.serve(SOCKET)
    try:
        register(resource)
        logger.info("%s: %d devices registered", resource, count)
        while SOCKET.exists():
            time.sleep(0.5)
    except grpc.RpcError as error:
        logger.warning("the kubelet does not answer yet: %s", error)
        time.sleep(0.2)
    finally:
        plugin.stopped.set()
        server.stop(grace=0).wait()
        SOCKET.unlink(missing_ok=True)


def main() -> None:
    """Serve forever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resource", required=True)
    parser.add_argument("--count", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    while True:
        run_once(arguments.resource, arguments.count)


if __name__ == "__main__":
    main()
