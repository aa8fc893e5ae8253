"""The suite that holds an engine to `spill.engine`: inherit `EngineContract` and give it one fixture.

    class TestMine(EngineContract):
        @pytest.fixture
        def open_engine(self):
            return my_engine.engine.open_engine

Models, rows and prompts come from the suite; the truth comes from `spill.testing.reference` and `spill.adamw`.
"""

from spill.testing.engine_generation import GenerationContract
from spill.testing.engine_state import StateContract
from spill.testing.engine_training import TrainingContract


class EngineContract(TrainingContract, StateContract, GenerationContract):
    """All of it. `EngineBase` says which attributes a subclass may set, such as tolerances for bfloat16."""
