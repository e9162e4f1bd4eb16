"""JSON that is nested too deeply, wherever the daemons read JSON of others: an error there, and no traceback."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conformance.redesigned_helpers import create, one
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, Nsqlookupd, sized

from flintmq.message import HEADER_NAMES_SIZE_MAX if False else json  # replaced below
