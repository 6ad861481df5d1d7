from pathlib import Path

from alembic import op
