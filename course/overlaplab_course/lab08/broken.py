"""Programs to repair: cells of the lesson with `broken=true`, as handed out."""

from overlaplab_course.marked_cells import define_marked

define_marked(globals())
