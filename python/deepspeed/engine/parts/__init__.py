"""The parts of every engine. Each file registers its part (``members.engine_parts``); no list names them."""
