// All kernels, each file in a namespace of its own: on a GPU they are modules that do not know each other.

#include "../common.h"

namespace attention {
#include "../attention.cu"
}
namespace gather {
#include "../gather.cu"
}
namespace images {
#include "../images.cu"
}
namespace pointwise {
#include "../pointwise.cu"
}
namespace rows {
#include "../rows.cu"
}
