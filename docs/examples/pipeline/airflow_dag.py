"""Airflow: history into the lake every ten minutes, and every night whether it is all there, audited and reported on.

The workers need `durable-bus[spark]`, and Java where a task starts Spark. Each command ends with 0 when all is well, so
that Airflow retries what failed, alerts, and holds back what comes after it. All of them may run twice.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

LAKE = "s3://archive/shop"
SERVICES = {"orders": "ORDERS_URL", "billing": "BILLING_URL"}
"""Each service, and the variable of the workers' environment that holds the URL of its database."""

RETRYING = {"retries": 3, "retry_delay": timedelta(minutes=2), "execution_timeout": timedelta(hours=1)}


def of_service(command: str, service: str) -> BashOperator:
    """A command about one service's database."""
    return BashOperator(
        task_id=f"{command.split()[0]}_{service}",
        bash_command=f'durable-agent pipeline {command} --service {service} --database "${SERVICES[service]}" '
        f"--lake {LAKE} --json",
        append_env=True,
    )


with DAG(
    dag_id="durable_archive",
    schedule=timedelta(minutes=10),
    start_date=datetime(2026, 1, 1),
    catchup=False,  # a run archives all that is new, however long the last one was ago
    max_active_runs=1,
    default_args=RETRYING,
):
    for name in SERVICES:
        of_service("archive", name)

with DAG(
    dag_id="durable_nightly",
    schedule="30 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args=RETRYING,
):
    compact = BashOperator(task_id="compact", bash_command=f"durable-agent pipeline compact --lake {LAKE} --above 10")
    vacuum = BashOperator(task_id="vacuum", bash_command=f"durable-agent pipeline vacuum --lake {LAKE} --keep 7")
    audit = BashOperator(
        task_id="audit",
        bash_command=f"durable-agent pipeline audit --sender {LAKE} --receiver {LAKE} --since 2d --json",
        retries=0,  # what is lost stays lost
    )
    report = BashOperator(
        task_id="report",
        bash_command=f"durable-agent pipeline report --lake {LAKE} --since 7d --out /srv/reports/{{{{ ds }}}}.html",
    )
    for name in SERVICES:
        verify, purge = of_service("verify", name), of_service("purge --keep 30", name)
        verify >> purge >> compact
    compact >> vacuum
    compact >> audit >> report
