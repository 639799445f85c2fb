"""The course's solutions: cells of the lesson with `reference=true`."""

from overlaplab_course.marked_cells import define_marked

define_marked(globals())
