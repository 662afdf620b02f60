"""Logging as a library: structlog events through the stdlib logger "fastdraft", silent until the user listens."""

from __future__ import annotations

import logging
from typing import cast

import structlog

__all__ = ["get_logger"]

# Without a handler of its own, stdlib's last resort would print our warnings to stderr.
logging.getLogger("fastdraft").addHandler(logging.NullHandler())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Returns a structlog logger for a module; event fields arrive as attributes of the ``LogRecord``.

    Args:
        name: The module's ``__name__``.
    """
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
    )
    return cast(structlog.stdlib.BoundLogger, logger)
