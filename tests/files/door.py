"""A door before the server of the buckets, that can be slow, or closed."""

import contextlib
import http.client
import http.server
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

# What is refused: given the method, the path with its query, and the body, the
# status to answer with, 0 to hang up without an answer, None to let it pass.
Refusal = Callable[[str, str, bytes], int | None]
REASONS = {
  403: 'x@example.com does not have storage.objects.create access',
  503: 'We encountered an internal error. Please try again.',
}


class Door(http.server.ThreadingHTTPServer):
  """Passes requests on to a server on this machine.

  Attributes:
    refusal: of a request; passes all.
    seconds: from one piece of an answer to the next, of eight.
    num_refused: so far.
  """

  daemon_threads = True

  def __init__(self, server_port: int):
    super().__init__(('127.0.0.1', 0), _Handler)
    self.server_port_behind = server_port
    self.refusal: Refusal = lambda method, path, body: None
    self.seconds = 0.0
    self.num_refused = 0

  def handle_error(self, request, client_address) -> None:
    """Says nothing: a client may hang up as well."""

  @property
  def port(self) -> int:
    return self.server_address[1]


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  server: Door

  def do_any(self) -> None:
    body = self._body()
    status = self.server.refusal(self.command, self.path, body)
    if status is None:
      self._pass_on(body)
      return
    self.server.num_refused += 1
    if status:
      reason = (
        f'{{"error": {{"code": {status}, "message": "{REASONS[status]}"}}}}'
      )
      self._answer(
        status, {'Content-Type': 'application/json'}, reason.encode()
      )
    else:
      self.close_connection = True

  do_DELETE = do_GET = do_PATCH = do_POST = do_PUT = do_any

  def _body(self) -> bytes:
    if self.headers.get('Transfer-Encoding') != 'chunked':
      return self.rfile.read(int(self.headers.get('Content-Length', 0)))
    body = b''
    while size := int(self.rfile.readline(), 16):
      body += self.rfile.read(size)
      self.rfile.readline()
    self.rfile.readline()
    return body

  def _pass_on(self, body: bytes) -> None:
    port = self.server.server_port_behind
    with contextlib.closing(
      http.client.HTTPConnection('127.0.0.1', port)
    ) as connection:
      own = (
        'host',
        'connection',
        'transfer-encoding',
        'content-length',
        'expect',
      )
      headers = {k: v for k, v in self.headers.items() if k.lower() not in own}
      connection.request(self.command, self.path, body or None, headers)
      found = connection.getresponse()
      data = found.read()
    # An upload in parts goes on through the door.
    behind, here = (f'127.0.0.1:{each}' for each in (port, self.server.port))
    headers = {k: v.replace(behind, here) for k, v in found.getheaders()}
    self._answer(found.status, headers, data)

  def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
    self.send_response_only(status)
    for name, value in headers.items():
      if name.lower() not in (
        'connection',
        'content-length',
        'transfer-encoding',
      ):
        self.send_header(name, value)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    size = -(-len(data) // (8 if self.server.seconds else 1)) or 1
    for start in range(0, len(data), size):
      time.sleep(self.server.seconds)
      self.wfile.write(data[start : start + size])
      self.wfile.flush()

  def log_message(self, format: str, *args) -> None:
    """Says nothing."""


@contextlib.contextmanager
def opened(server_port: int) -> Iterator[Door]:
  """A door before the server at a port."""
  with Door(server_port) as door:
    thread = threading.Thread(target=door.serve_forever, daemon=True)
    thread.start()
    try:
      yield door
    finally:
      door.shutdown()
      thread.join()


def writes_of(part: str, status: int) -> Refusal:
  """Refuses to write objects with this part in their names."""

  def refusal(method: str, path: str, body: bytes) -> int | None:
    # gcsfs sends the name before the contents, tensorstore in the path.
    name = urllib.parse.unquote(path) + body[:500].decode(errors='replace')
    return status if method in ('POST', 'PUT') and part in name else None

  return refusal


def reads_of(part: str, status: int) -> Refusal:
  """Refuses to read them."""

  def refusal(method: str, path: str, body: bytes) -> int | None:
    is_read = method == 'GET' and 'alt=media' in path
    return status if is_read and part in urllib.parse.unquote(path) else None

  return refusal


def everything_after(part: str) -> Refusal:
  """Hangs up on everybody from the first request on whose path has this part:
  a server that went away then."""
  is_gone = False

  def refusal(method: str, path: str, body: bytes) -> int | None:
    nonlocal is_gone
    is_gone = is_gone or part in urllib.parse.unquote(path)
    return 0 if is_gone else None

  return refusal
