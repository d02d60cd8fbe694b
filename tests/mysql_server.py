"""MySQL in place of MariaDB: with DLOCK_TEST_MYSQLD="/usr/sbin/mysqld" the tests of MariaDB run on it.

No current release of Debian has MySQL, so it is used only on request. The command may have several words, as with a
chroot, in which the temporary directory has to be the same.
"""

import os
import shlex
from pathlib import Path
from typing import Final

import pytest

from tests.servers import Server

MYSQLD: Final = shlex.split(os.environ.get("DLOCK_TEST_MYSQLD", ""))
DIALECT: Final = "mysql" if MYSQLD else "mariadb"
"""What SQLAlchemy calls the server behind the fixture `mariadb`."""

mariadb_only = pytest.mark.skipif(bool(MYSQLD), reason="what MariaDB only does; this is a run on MySQL")

LIKE_A_DEADLOCK: Final = "BEGIN NOT ATOMIC ROLLBACK; SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213; END"
"""What MariaDB does with the victim of a deadlock."""

_INIT: Final = """\
CREATE DATABASE IF NOT EXISTS dlock CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci;
CREATE USER IF NOT EXISTS 'root'@'127.0.0.1';
GRANT ALL ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;
"""


def mysql(directory: Path, port: int) -> Server:
    """Return MySQL with the user `root`, no password, and a database `dlock` whose collation is not the server's."""
    init = directory.with_suffix(".sql")
    init.write_text(_INIT)
    own = ["--no-defaults", "--user=root", f"--datadir={directory}", f"--tmpdir={directory}", "--mysqlx=OFF"]
    own.append("--secure-file-priv=NULL")  # its directory exists only where the whole package is installed
    fast = ["--skip-log-bin", "--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync"]
    fast += ["--innodb-doublewrite=OFF", "--innodb-buffer-pool-size=64M", "--max-connections=200"]
    where = [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={directory}/mysql.sock", "--skip-name-resolve"]
    plain = ["--tls-version="]  # the proxy that loses replies has to read them
    return Server(
        directory=directory,
        port=port,
        prepare=[[*MYSQLD, *own, "--initialize-insecure"]],
        command=[*MYSQLD, *own, *fast, *where, *plain, f"--init-file={init}", f"--pid-file={directory}/mysql.pid"],
        ready="ready for connections. Version",
    )
