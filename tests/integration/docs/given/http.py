from fastapi import FastAPI

from durable import Bus

app = FastAPI()
