"""Which observers a run has."""

from fedmuon.config.schema import reads
from fedmuon.federated.client_data import left_out_counts
from fedmuon.federated.experiment import Engine
from fedmuon.optim.adapter_means import FactorError
from fedmuon.optim.gossip import Gossip
from fedmuon.runs.observers.adapters import AdapterMeans
from fedmuon.runs.observers.average_model import AverageModel
from fedmuon.runs.observers.client_records import ClientRecords
from fedmuon.runs.observers.client_tests import ClientTests
from fedmuon.runs.observers.client_texts import ClientTexts
from fedmuon.runs.observers.consensus import Consensus
from fedmuon.runs.observers.continuations import Continuations
from fedmuon.runs.observers.evaluation import Evaluation
from fedmuon.runs.observers.observer import Observer
from fedmuon.runs.observers.perplexity import Perplexity
from fedmuon.runs.observers.personal_models import PersonalModels
from fedmuon.runs.observers.profile import Profile
from fedmuon.runs.observers.published_model import PublishedModel
from fedmuon.runs.observers.replies import Replies
from fedmuon.runs.observers.simulated_time import SimulatedTime
from fedmuon.runs.observers.unseen_clients import UnseenClients
from fedmuon.runs.observers.user_callbacks import UserCallback
from fedmuon.runs.observers.worker_memory import Measured, WorkerMemory
from fedmuon.runs.prepare import Run
from fedmuon.tasks.causal_lm import is_language_model


def observers_of(run: Run, engine: Engine) -> tuple[Observer, ...]:
    """Return the observers of a run, in the order in which the loop calls them.

    This is also the order of the fields in rounds.jsonl. Clients' records are written after all
    other observers have measured the round. A profile comes after these, so that it contains their
    time. The user's callbacks come last.
    """
    experiment, observers = run.experiment, list[Observer]()
    clock = experiment.plan.timetable
    if isinstance(engine, Measured):
        observers.append(WorkerMemory(engine))
    if clock is not None:
        observers.append(SimulatedTime(clock))
    observers.append(Replies(clock))
    observers.append(ClientTests(run) if run.config.data.client_test else Evaluation(run))
    observers += [
        Consensus(run, stage) for stage in experiment.recipe.stages if isinstance(stage, Gossip)
    ]
    measured = any(isinstance(stage, FactorError) for stage in experiment.recipe.stages)
    exact = run.config.federation.adapters == "exact" and reads(run.config, "federation.adapters")
    if measured or exact:
        observers.append(AdapterMeans(run))
    if is_language_model(experiment.task):
        observers += [Perplexity(run), ClientTexts(run), Continuations(run)]
    if any(left_out_counts(run.config).values()):
        observers.append(UnseenClients(run))
    if run.config.output.average:
        observers.append(AverageModel(run))
    if run.config.stability.output_noise and reads(run.config, "stability.output-noise"):
        observers.append(PublishedModel(run))
    if run.config.output.clients:
        observers.append(ClientRecords(run))
    if experiment.recipe.personalizes:
        observers.append(PersonalModels(run))
    if run.config.output.profile:
        observers.append(Profile(engine))
    return (*observers, *map(UserCallback, run.callbacks))
