"""Modules that import by name what tests of commands replace: imported before, so that none keeps a replacement."""

import meshwright.execution.loading.adapter
import meshwright.execution.training.library
import meshwright.proof.program_plans.fit.library
import meshwright.proof.program_plans.plan
import meshwright.proof.verification.library
import meshwright.serving.server  # noqa: F401
