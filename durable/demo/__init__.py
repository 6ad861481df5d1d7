"""`durable-agent demo`: two services, real flights, and nodes that are killed while they work. Nothing is lost.

airline, punctuality    the two services, as an application would write them; start reading here
messages                what they say to each other
flights                 the data set
node                    one node as a process
fleet                   the processes, and how they are killed, paused and resumed
roads                   what they send each other over: TCP, HTTP, or a RabbitMQ broker
mishaps, outages        what befalls them and the broker, and when
events                  what befell them in fact
observer, latches       what the databases say meanwhile
supervisor              one run
operators               the console of both services meanwhile
report, screen          what is printed
stage, run              what is needed before, and the command itself
pipeline                the same, and then its history through the pipeline: archive, audit, report, replay
steps, again            the commands for that, one by one; the fresh service that the replay goes to
"""

from durable.demo.pipeline import run_pipeline
from durable.demo.run import run_demo

__all__ = ["run_demo", "run_pipeline"]
