"""moto's S3 on the port given, one request at a time: by itself it checks and then sets, and loses races of threads."""

import logging
import sys
import threading
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

ONE_AT_A_TIME = threading.Lock()


def main(port: int) -> None:
    app = DomainDispatcherApplication(create_backend_app)

    def serialised(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        with ONE_AT_A_TIME:
            return list(app(environ, start_response))

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    run_simple("127.0.0.1", port, serialised, threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
